"""Plans the conversion of a whole model between Megatron's ``torch_dist`` and transformers.

Every tensor of one side must map to one of the other; :mod:`moe_optim.rollout.families` defines the
names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import CheckpointReader, is_state
from moe_optim.commands.conversion.expert_finding import (
    STORED,
    check_row_order,
    known_interleave,
    refuse_quantized,
    source_layouts,
)
from moe_optim.commands.conversion.file_plan import FilePlan, Part
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.model_sources import (
    dequantized,
    read_model,
    require_format,
    require_promised_layers,
)
from moe_optim.commands.hugging_face.models import Model
from moe_optim.errors import LayoutError
from moe_optim.experts.keys.conversion import convert_expert_set
from moe_optim.experts.keys.finding import survey_expert_sets
from moe_optim.experts.keys.layouts import get_layout, is_of_adapter
from moe_optim.rollout.families import LAYOUT_OF_EXPERTS, Implementation, NamePair

Target = Literal["hf", "megatron"]
_LAYER = re.compile(r"(?<=layers)\.[0-9]+\.")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """Options of the conversion of a whole model."""

    to: Target
    transformer_impl: Implementation = "transformer_engine"
    """Layer implementation that will load the result in Megatron."""
    glu_interleave: int = 0
    """GLU interleave of experts written for Megatron."""
    source_glu_interleave: int | None = None
    tokenizer: Path | None = None
    """Folder of tokenizer files to copy."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan(FilePlan):
    """Embeddings first, then layer by layer."""

    model: Model
    request: ModelRequest

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest part, an upper bound of the memory used."""
        return max(map(self.part_bytes, self.parts))

    def part_bytes(self, part: Part) -> int:
        """Return the bytes of a part, the larger of read and written."""
        nbytes = self.view.nbytes(part.sources)
        if part.pair is None or part.pair.form != "same":
            return nbytes
        return max(nbytes, len(part.pair.hf) * self.view.nbytes(part.sources[:1]))  # copies

    def files(self) -> Iterator[list[Part]]:
        """Yield the parts in order, in groups no larger than the largest part."""
        return self.grouped(self.parts)

    def convert(self, part: Part) -> dict[str, Tensor]:
        """Read a part and return it under the names of the other side."""
        tensors, to_hf = self.read(part), self.request.to == "hf"
        if part.pair is not None:
            if to_hf:
                return self.model.heads.to_hf(part.pair, tensors[part.sources[0]])
            return {part.target: self.model.heads.to_megatron(part.pair, list(tensors.values()))}
        assert part.experts is not None, "a part is a tensor or experts"
        interleave = 0 if to_hf else self.request.glu_interleave
        converted = convert_expert_set(
            tensors,
            part.experts,
            get_layout(LAYOUT_OF_EXPERTS if to_hf else "grouped"),
            source_interleave=self.source_interleave or None,
            target_interleave=interleave or None,
        )
        prefix = part.experts.prefix
        return {part.target + key.removeprefix(prefix): one for key, one in converted.items()}


def plan_model(reader: CheckpointReader, request: ModelRequest) -> ModelPlan:
    """Return the plan without reading tensor values.

    Raises:
        ConfigError: the other side has no such model, or the checkpoint does not identify it.
        LayoutError: tensors are missing, left over, duplicated, or of wrong shapes; the message
            lists all of them.
    """
    require_format(reader, request.to)
    reader = dequantized(reader)
    model = read_model(reader)
    require_promised_layers(model, reader)
    view = LayerView(reader, num_layers=model.anatomy.num_layers)
    kept = [key for key in view.tensors if not is_state(key) and not _has_no_meaning(key)]
    refuse_quantized(view, kept)
    source_interleave = known_interleave(view, request.source_glu_interleave)
    check_row_order(view, source_interleave)
    faults: list[str] = []
    parts = [*_tensor_parts(view, model, request, faults)]
    parts += _expert_parts(view, model, request, kept, faults)
    taken = {key for part in parts for key in part.sources}
    if not faults:  # else tensors are left over because others are missing
        faults += [f"{key}: left over" for key in kept if key not in taken]
    faults += _interleave_faults(parts, source_interleave, request)
    faults += _uneven_faults(parts, view)
    faults += [
        f"{key}: expected bf16, fp16 or fp32, got {view.tensors[key].dtype}"
        for part in parts
        for key in part.sources
        if view.tensors[key].dtype not in _FLOATS
    ]
    if faults:
        raise LayoutError(
            f"{reader.path}: expected the tensors of {model.family.architecture}, got "
            f"{len(faults)} fault(s):\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "Nothing was converted."
        )
    return ModelPlan(
        view=view,
        parts=tuple(sorted(parts, key=_place)),
        source_interleave=source_interleave,
        left_out=(*(key for key in view.tensors if key not in taken), *reader.objects),
        model=model,
        request=request,
    )


def _has_no_meaning(key: str) -> bool:
    """Return whether a key is an amax of experts; an adapter's tensor is not."""
    _, stored, remainder = key.rpartition(STORED)
    return bool(stored) and not is_of_adapter(remainder)


def _tensor_parts(
    view: LayerView, model: Model, request: ModelRequest, faults: list[str]
) -> Iterator[Part]:
    for pair in model.family.pairs(model.anatomy):
        choices = [(name,) for name in pair.megatron] if request.to == "hf" else [pair.hf]
        found = [names for names in choices if any(name in view.tensors for name in names)]
        if len(found) > 1:
            faults.append(f"{' and '.join(names[0] for names in found)}: there is one too many")
            continue
        names = found[0] if found else choices[0]
        missing = [f"{name}: missing" for name in names if name not in view.tensors]
        fault = None if missing else _shape_fault(view, model, pair, names)
        faults += missing + ([fault] if fault else [])
        if not missing and not fault:
            target = pair.megatron_name(request.transformer_impl)
            yield Part(sources=names, pair=pair, target=target)


def _shape_fault(
    view: LayerView, model: Model, pair: NamePair, names: tuple[str, ...]
) -> str | None:
    infos = [view.tensors[name] for name in names]
    if len({info.dtype for info in infos}) > 1:
        return f"{' and '.join(names)}: expected one dtype, got several"
    shapes = [info.shape for info in infos]
    if names == pair.hf:
        fits = model.heads.megatron_shape(pair, shapes) is not None
    else:
        fits = model.heads.hf_shapes(pair, shapes[0]) is not None
    if fits:
        return None
    if pair.form == "same":
        return f"{' and '.join(names)}: expected one shape, got several"
    got = " and ".join(str(list(shape)) for shape in shapes)
    return f"{' and '.join(names)}: expected rows of {pair.form.replace('_', ' and ')}, got {got}"


def _expert_parts(
    view: LayerView, model: Model, request: ModelRequest, kept: list[str], faults: list[str]
) -> list[Part]:
    sets, found = survey_expert_sets(
        {key: view.tensors[key].shape for key in kept},
        layouts=source_layouts(view, None),
        num_experts=model.num_experts,
    )
    faults += found
    by_prefix = {one.prefix: one for one in sets}
    named = "".join(found)
    parts = []
    for megatron, hf in model.anatomy.expert_prefixes():
        source, target = (megatron, hf) if request.to == "hf" else (hf, megatron)
        one = by_prefix.pop(source, None)
        if one is not None:
            parts.append(Part(sources=one.keys, experts=one, target=target))
            if one.has_bias:
                faults.append(f"{one.keys[0]} and its biases: expected no biases")
        elif source not in named:
            faults.append(f"{source}*: missing")
    faults += [f"{prefix}*: left over" for prefix in by_prefix]
    return parts


def _interleave_faults(parts: list[Part], source: int, request: ModelRequest) -> list[str]:
    widths = {part.experts.ffn for part in parts if part.experts is not None}
    return [
        f"GLU interleave: expected a divisor of {ffn}, the width of experts, got {interleave}"
        for interleave in {source, request.glu_interleave} - {0}
        for ffn in widths
        if ffn % interleave
    ]


def _uneven_faults(parts: list[Part], view: LayerView) -> list[str]:
    """Return tensors whose shape or dtype differs from the same tensor in other layers."""
    first: dict[str, str] = {}
    faults = []
    for part in parts:
        for key in part.sources:
            like = first.setdefault(_LAYER.sub(".*.", key, count=1), key)
            got, want = view.tensors[key], view.tensors[like]
            if got != want:
                faults.append(
                    f"{key}: expected {want.dtype} {list(want.shape)} as {like}, got {got.dtype} "
                    f"{list(got.shape)}"
                )
    return faults


def _place(part: Part) -> tuple[int, bool]:
    """Sort key: tensors outside layers first, then by layer, experts last."""
    key = part.sources[0].partition("layers.")[2].partition(".")[0]
    return (int(key) if key.isdigit() else -1), part.pair is None
