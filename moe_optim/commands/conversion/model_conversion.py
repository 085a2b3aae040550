"""Plans the conversion of a whole model between Megatron's ``torch_dist`` and transformers.

Every tensor of one side must map to one of the other; :mod:`moe_optim.rollout.families` defines the
names.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import CheckpointReader, Recorded, is_state
from moe_optim.checkpoint.files.torch_dist import INTERLEAVE_ARG, OWN_ARGUMENTS
from moe_optim.commands.conversion.expert_finding import (
    STORED,
    check_row_order,
    known_interleave,
    refuse_quantized,
    survey_experts,
)
from moe_optim.commands.conversion.file_plan import (
    BytesDone,
    FilePlan,
    Part,
    convert_experts,
    in_files,
    kept_parts,
    saved,
    torch_dist_checkpoint,
    write_common_state,
    write_torch_dist,
)
from moe_optim.commands.conversion.layer_view import LayerView, Place, stored_key
from moe_optim.commands.conversion.model_sources import (
    Target,
    dequantized,
    folder_of,
    read_config,
    read_model,
    read_tokenizer,
    require_format,
    require_promised_layers,
    special_tokens,
    spell_config,
    unquantized_config,
)
from moe_optim.commands.hugging_face.models import Model
from moe_optim.errors import LayoutError
from moe_optim.experts.keys.layouts import get_layout, is_of_adapter
from moe_optim.rollout.families import LAYOUT_OF_EXPERTS, Implementation, NamePair
from moe_optim.rollout.rows import Heads

_LAYER = re.compile(r"(?<=layers)\.[0-9]+\.")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FILE_BYTES = 2**32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """Options of the conversion of a whole model."""

    to: Target
    transformer_impl: Implementation = "transformer_engine"
    """Layer implementation that will load the result in Megatron."""
    glu_interleave: int = 0
    """GLU interleave of experts written for Megatron."""
    source_glu_interleave: int | None = None
    """GLU interleave of the source; None if it is recorded."""
    tokenizer: Path | None = None
    """Folder of tokenizer files to copy."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan(FilePlan):
    """Embeddings first, then layer by layer."""

    model: Model
    request: ModelRequest

    @property
    def _recorded(self) -> Recorded:
        return Recorded(
            layout=LAYOUT_OF_EXPERTS,
            glu_interleave=0,
            num_experts=self.model.num_experts,
            iteration=self.view.recorded.iteration,
        )

    def _texts(self) -> dict[str, bytes]:
        if self.request.to == "megatron":
            return {}
        tokenizer = self.request.tokenizer
        files = {} if tokenizer is None else read_tokenizer(tokenizer, beside=tokenizer)
        dtype = str(self.view.tensors[self.parts[0].sources[0]].dtype).removeprefix("torch.")
        config = {**self.model.config, **special_tokens(tokenizer), "torch_dtype": dtype}
        return files | spell_config(config)

    def _write_tensors(self, folder: Path, report: BytesDone, workers: int) -> None:
        if self.request.to == "megatron":
            _write_megatron(self, folder, report, workers)
        else:
            super()._write_tensors(folder, report, workers)

    def place_of(self, part: Part, name: str) -> tuple[Place, int]:
        """Return where Megatron stores a tensor: in one of all layers, if these are alike."""
        if self.request.to == "hf":
            return super().place_of(part, name)
        name = stored_key(name) if part.experts is not None else name
        head, _, tail = name.partition(".layers.")
        layer, _, rest = tail.partition(".")
        if head == "decoder" and self.model.is_stacked:
            return Place(f"{head}.layers.{rest}", int(layer)), self.model.anatomy.num_layers
        return Place(name), 0


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
    interleave = known_interleave(view, request.source_glu_interleave)
    request = replace(request, source_glu_interleave=interleave)
    check_row_order(view, interleave)
    faults: list[str] = []
    parts = [*_tensor_parts(view, model, request, faults)]
    parts += _expert_parts(view, model, request, kept, faults)
    taken = {key for part in parts for key in part.sources}
    if not faults:  # else tensors are left over because others are missing
        faults += [f"{key}: left over" for key in kept if key not in taken]
    faults += _interleave_faults(parts, {interleave, request.glu_interleave} - {0})
    faults += _dtype_faults(parts, view)
    if faults:
        raise LayoutError(
            f"{reader.path}: expected the tensors of {model.family.architecture}, found "
            f"{len(faults)} problem{'s' * (len(faults) > 1)}:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "Nothing was converted."
        )
    return ModelPlan(
        view=view,
        files=tuple(in_files(sorted(parts, key=_place), max(part.nbytes for part in parts))),
        left_out=(*(key for key in view.tensors if key not in taken), *reader.objects),
        model=model,
        request=request,
    )


@dataclass(frozen=True, kw_only=True)
class DequantizationPlan(FilePlan):
    """The same tensors in bf16; ``tokenizer`` None means that of the source, if it has any."""

    tokenizer: Path | None

    def _texts(self) -> dict[str, bytes]:
        folder = folder_of(self.view.reader)
        files = read_tokenizer(self.tokenizer, beside=folder)
        said = {k: one for k, one in special_tokens(self.tokenizer).items() if one is not None}
        return files | spell_config({**unquantized_config(read_config(folder)), **said})


def plan_dequantization(
    reader: CheckpointReader, tokenizer: Path | None = None
) -> DequantizationPlan:
    """Return the plan of the same tensors in bf16 without reading their values.

    Raises:
        ConfigError: ``config.json`` declares no quantization, or one that is unknown.
        LayoutError: elements or scales are missing, superfluous, or of wrong shapes or dtypes.
    """
    shown = dequantized(reader)
    if shown is reader:
        require_format(reader, "hf")
    view = LayerView(shown)
    parts = kept_parts(view, view.tensors)
    most = max(_FILE_BYTES, *(part.nbytes for part in parts))
    return DequantizationPlan(view=view, files=tuple(in_files(parts, most)), tokenizer=tokenizer)


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
            yield _tensor_part(view, model, request, pair, names)


def _tensor_part(
    view: LayerView, model: Model, request: ModelRequest, pair: NamePair, names: tuple[str, ...]
) -> Part:
    nbytes, target = view.nbytes(names), pair.megatron_name(request.transformer_impl)
    if pair.form == "same":
        nbytes = max(nbytes, len(pair.hf) * view.tensors[names[0]].nbytes)  # copies
    is_hf = request.to == "hf"
    return Part(
        sources=names,
        nbytes=nbytes,
        convert=partial(_to_hf if is_hf else _to_megatron, model.heads, pair, target),
        targets=pair.hf if is_hf else (target,),
    )


def _to_hf(
    heads: Heads, pair: NamePair, _: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    (values,) = tensors.values()
    return heads.to_hf(pair, values)


def _to_megatron(
    heads: Heads, pair: NamePair, target: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {target: heads.to_megatron(pair, list(tensors.values()))}


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
) -> Iterator[Part]:
    shapes = {key: view.tensors[key].shape for key in kept}
    sets, found = survey_experts(view, shapes, model.num_experts)
    faults += found
    by_prefix = {one.prefix: one for one in sets}
    layout = get_layout(LAYOUT_OF_EXPERTS if request.to == "hf" else "grouped")
    after = 0 if request.to == "hf" else request.glu_interleave
    for megatron, hf in model.anatomy.expert_prefixes():
        source, target = (megatron, hf) if request.to == "hf" else (hf, megatron)
        one = by_prefix.pop(source, None)
        if one is not None:
            convert = partial(
                convert_experts,
                source=one,
                target=replace(one, prefix=target, layout=layout),
                rows=(request.source_glu_interleave or 0, after),
            )
            yield Part(
                sources=one.keys,
                nbytes=view.nbytes(one.keys),
                experts=one,
                convert_experts=convert,
                targets=(target,),
            )
            if one.has_bias:
                faults.append(f"{one.keys[0]} and its biases: expected no biases")
        elif not any(source in fault for fault in found):
            faults.append(f"{source}*: missing")
    faults += [f"{prefix}*: left over" for prefix in by_prefix]


def _interleave_faults(parts: list[Part], interleaves: set[int]) -> list[str]:
    widths = {part.experts.ffn for part in parts if part.experts is not None}
    return [
        f"GLU interleave: expected a divisor of {ffn}, the width of experts, got {interleave}"
        for interleave in interleaves
        for ffn in widths
        if ffn % interleave
    ]


def _dtype_faults(parts: list[Part], view: LayerView) -> list[str]:
    """Return tensors that differ from the same tensor in other layers, or are no floats."""
    first: dict[str, str] = {}
    uneven, others = [], []
    for key in (key for part in parts for key in part.sources):
        like = first.setdefault(_LAYER.sub(".*.", key, count=1), key)
        got, want = view.tensors[key], view.tensors[like]
        if got != want:
            uneven.append(
                f"{key}: expected {want.dtype} {list(want.shape)} as {like}, got {got.dtype} "
                f"{list(got.shape)}"
            )
        if got.dtype not in _FLOATS:
            others.append(f"{key}: expected bf16, fp16 or fp32, got {got.dtype}")
    return uneven + others


def _place(part: Part) -> tuple[int, bool]:
    """Sort key: tensors outside layers first, then by layer, experts last."""
    key = part.sources[0].partition("layers.")[2].partition(".")[0]
    return (int(key) if key.isdigit() else -1), part.experts is not None


def _write_megatron(plan: ModelPlan, folder: Path, report: BytesDone, workers: int) -> None:
    with torch_dist_checkpoint(folder, None) as (into, writer):
        arguments = dict(plan.model.arguments)
        own = {INTERLEAVE_ARG: plan.request.glu_interleave, OWN_ARGUMENTS: arguments}
        write_common_state(writer, 0, own)
        extra_states: dict[str, None] = {}
        for part in plan.parts:
            experts = part.experts.num_experts if part.experts else 0
            for name in plan.tensors(part) if experts else part.targets:
                place, layers = plan.place_of(part, name)
                of_layer = None if place.layer is None else (place.layer, layers)
                extra_states |= dict.fromkeys(_extra_states(place.name, of_layer, experts))
        for key in extra_states:
            writer.write_object(key, saved(None))
        write_torch_dist(plan, into, writer, report, workers)
        writer.finish()


def _extra_states(stored: str, layers: tuple[int, int] | None, experts: int) -> Iterator[str]:
    """Yield the keys of the ``_extra_state`` objects that may accompany a stored tensor.

    Megatron's linears and Transformer Engine's modules save one each, with the scales of delayed
    FP8 or empty. A strict load fails if one is missing and ignores extra ones, so every module that
    may have one gets an empty one. ``layers`` is the layer number and the number of layers.
    """
    if stored.startswith(("embedding.", "output_layer.")) or ".mlp.router." in stored:
        return
    module, _, tail = stored.rpartition(".")
    modules = [module] if tail in ("weight", "layer_norm_weight") else []
    if module.endswith("self_attention.linear_proj"):
        modules.append(f"{module.removesuffix('linear_proj')}core_attention")
    for name in modules:
        for expert in range(experts) if experts else [None]:
            place = [layers] if layers else []
            place += [] if expert is None else [(expert, experts)]
            offset = ".".join(str(number) for number, _ in place) or "0"
            shape = ".".join(str(count) for _, count in place) or "1"
            yield f"{name}._extra_state/shard_{offset}_{shape}"
