"""Plans an export with quantized experts without reading tensor values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_optim import ops
from moe_optim.checkpoint.files.reader import CheckpointReader, is_state
from moe_optim.checkpoint.state_kinds import MASTERS
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    find_experts,
    known_interleave,
    refuse_quantized,
    require_experts,
    without_experts,
)
from moe_optim.commands.conversion.file_plan import FilePlan, Part
from moe_optim.commands.conversion.layer_view import STATE_KIND, LayerView, state_kind
from moe_optim.commands.conversion.model_plan import ModelPlan, ModelRequest, plan_model
from moe_optim.commands.conversion.model_sources import CONFIG, folder_of, read_config
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.conversion import convert_expert_set, interleave_faults
from moe_optim.experts.keys.finding import raise_faults
from moe_optim.experts.keys.layouts import LINEARS, ExpertSet, KeyLayout, get_layout
from moe_optim.formats import FORMATS, BlockScaledFormat
from moe_optim.rollout.conventions import Convention, find_convention
from moe_optim.rollout.expert_tensors import export_experts, patterns_of, split_rows, tensor_name

_GROUPED, _TARGET = get_layout("grouped"), get_layout("hf_per_expert")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Options of an export; None derives the value from the checkpoint."""

    format: BlockScaledFormat
    convention: Convention
    source_layout: KeyLayout | None = None
    source_glu_interleave: int | None = None
    tokenizer: Path | None = None
    """Folder of tokenizer files to copy."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan(FilePlan):
    """Experts of all layers, from masters if every expert has one, and all other tensors."""

    model: ModelPlan | None
    """Mapping to Hugging Face names; None if the tensors already have them."""
    request: ExportRequest
    config: Mapping[str, Any]
    """``config.json`` of the model, without ``quantization_config``."""

    @property
    def reads_masters(self) -> bool:
        """Whether experts are quantized from masters, as in training."""
        return all(state_kind(part.sources[0]) in MASTERS for part in self.experts)

    @property
    def kept_interleave(self) -> int | None:
        """GLU interleave of the quantized rows, so that blocks are those of training.

        None if a block of the engine would mix gate and up rows: they are separated first.
        """
        fits = self.source_interleave % self.request.convention.scale_block[0] == 0
        return self.source_interleave if self.source_interleave and fits else None

    @property
    def unquantized(self) -> list[str]:
        """Sorted paths of the linears that stay in high precision."""
        named = [
            (name, self.view.tensors[part.sources[0]])
            for part in self.others
            for name in (part.pair.hf if part.pair is not None else part.sources)
        ]
        return sorted(
            name.removesuffix(".weight")
            for name, info in named
            if name.endswith(".weight") and len(info.shape) == 2 and "embed_tokens" not in name
        )

    def convert(self, part: Part) -> dict[str, Tensor]:
        """Read a part; quantize experts one by one, and rename other tensors."""
        if part.experts is None:
            return self.read(part) if self.model is None else self.model.convert(part)
        tensors = self.read(part)
        found: dict[str, Tensor] = {}
        for expert in range(part.experts.num_experts):
            one = convert_expert_set(
                tensors,
                part.experts,
                _GROUPED,
                source_interleave=self.source_interleave or None,
                target_interleave=self.kept_interleave,
                experts=range(expert, expert + 1),
            )
            for linear in LINEARS:
                found |= self._export(part.experts, part.target, expert, linear, one)
        return found

    def _export(
        self, experts: ExpertSet, prefix: str, expert: int, linear: str, one: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one linear of one expert, [1, R, C] and optionally a bias [1, R]."""
        stem = f"{experts.prefix}{linear}"
        values = one[f"{stem}.weight"].float()
        if not values.isfinite().all():
            raise StateError(
                f"{self.view.reader.path}: {stem}, expert {expert}: expected numbers, got Inf or "
                "NaN, which engines would spread to every token. Export an earlier checkpoint."
            )
        patterns = patterns_of(_TARGET, linear, "weight")
        kept = self.kept_interleave if len(patterns) > 1 else None
        (parts,) = export_experts(
            ops.quantize(values, self.request.format),
            self.request.convention,
            parts=len(patterns),
            interleave=kept,
            name=linear,
        )
        for pattern, part in zip(patterns, parts, strict=True):
            for suffix, tensor in part.items():
                yield tensor_name(prefix, pattern, expert, suffix), tensor
        if experts.has_bias:
            patterns = patterns_of(_TARGET, linear, "bias")
            biases = split_rows(one[f"{stem}.bias"].bfloat16(), len(patterns), kept)
            for pattern, bias in zip(patterns, biases, strict=True):
                yield tensor_name(prefix, pattern, expert, "bias"), bias[0]


def plan_export(
    reader: CheckpointReader, request: ExportRequest, config: Path | None = None
) -> ExportPlan:
    """Return the plan without reading tensor values.

    Megatron tensors are renamed according to the arguments saved in the checkpoint; safetensors
    must already have Hugging Face names. ``config`` None means the ``config.json`` of the
    checkpoint.

    Raises:
        ConfigError: there is no configuration, a Megatron tensor has no Hugging Face name, or the
            request contradicts the checkpoint.
        LayoutError: experts are incomplete, or do not fit the format.
    """
    plan_source = _plan_torch_dist if reader.format == "torch_dist" else _plan_safetensors
    plan = plan_source(reader, request, None if config is None else _given_config(config))
    _require_fits(plan)
    return plan


def _plan_torch_dist(
    reader: CheckpointReader, request: ExportRequest, config: Mapping[str, Any] | None
) -> ExportPlan:
    asked = ModelRequest(to="hf", source_glu_interleave=request.source_glu_interleave)
    model = plan_model(reader, asked)
    return ExportPlan(
        view=model.view,
        parts=(*_from_masters(model.view, request, model.experts), *model.others),
        source_interleave=model.source_interleave,
        model=model,
        request=request,
        config={"torch_dtype": "bfloat16", **model.model.config} if config is None else config,
    )


def _plan_safetensors(
    reader: CheckpointReader, request: ExportRequest, config: Mapping[str, Any] | None
) -> ExportPlan:
    view, path = LayerView(reader), reader.path
    keys = [key for key in view.tensors if not is_state(key)]
    refuse_quantized(view, keys)
    sets = find_experts(view, keys, layout=request.source_layout)
    require_experts(view, sets, len(keys))
    if named := [one.prefix for one in sets if one.prefix.startswith("decoder.")]:
        raise ConfigError(
            f"{path}: expected names of Hugging Face, which engines load, got Megatron's "
            f"{named[0]}*. Export the torch_dist checkpoint."
        )
    interleave = known_interleave(view, request.source_glu_interleave)
    check_row_order(view, interleave)
    experts = [Part(sources=one.keys, experts=one, target=one.prefix) for one in sets]
    others = [Part(sources=(key,)) for key in without_experts(keys, sets)]
    return ExportPlan(
        view=view,
        parts=(*_from_masters(view, request, experts), *others),
        source_interleave=interleave,
        model=None,
        request=request,
        config=read_config(folder_of(reader)) if config is None else config,
    )


def _from_masters(
    view: LayerView, request: ExportRequest, weights: tuple[Part, ...] | list[Part]
) -> list[Part]:
    """Return parts that read masters if those of all experts are stored by name, else weights."""
    keys = [key for key in view.tensors if state_kind(key) in MASTERS and STATE_KIND.match(key)]
    sets = find_experts(view, keys, layout=request.source_layout)
    masters = {STATE_KIND.sub("", one.prefix, count=1): one for one in sets}
    found = [masters.get(part.experts.prefix) for part in weights if part.experts is not None]
    if None in found:
        return list(weights)
    return [
        replace(part, sources=one.keys, experts=one)
        for part, one in zip(weights, found, strict=True)
        if one is not None
    ]


def _given_config(path: Path) -> dict[str, Any]:
    if path.name != CONFIG:
        raise ConfigError(
            f"--config {path}: expected a file called {CONFIG}, got {path.name}. Give that of the "
            "model."
        )
    return read_config(path.parent)


def _require_fits(plan: ExportPlan) -> None:
    """Raise LayoutError for rows that cannot be interleaved, and shapes that do not fit."""
    stored = [part.experts for part in plan.experts if part.experts is not None]
    interleave = plan.source_interleave or None
    raise_faults([fault for one in stored for fault in interleave_faults(one, interleave)])
    block_rows, _ = plan.request.convention.scale_block
    for ffn, hidden in {(one.ffn, one.hidden) for one in stored}:
        where = f"{plan.view.reader.path}: "
        if ffn % block_rows:
            raise LayoutError(
                f"{where}linear_fc1: expected gate and up in runs of {block_rows} rows or a "
                f"multiple, the height of a block of scales, got {ffn} rows each. "
                f"{_advise(ffn, hidden)} --moe-ffn-hidden-size that is such a multiple."
            )
        _check_shapes(plan.request.format, ffn, hidden, where)


def _check_shapes(format: BlockScaledFormat, ffn: int, hidden: int, where: str = "") -> None:
    format.check_shape((1, 2 * ffn, hidden), f"{where}linear_fc1")
    format.check_shape((1, hidden, ffn), f"{where}linear_fc2")


def _advise(ffn: int, hidden: int) -> str:
    """Return a sentence on other formats for experts of this size, up to "train with a"."""
    fitting = []
    for format in FORMATS.values():
        try:
            _check_shapes(format, ffn, hidden)
        except LayoutError:
            continue
        if ffn % find_convention(format).scale_block[0] == 0:
            fitting.append(format.name)
    if not fitting:
        return "Train with a"
    *others, last = fitting
    named = f"{', '.join(others)} or {last}" if others else last
    return f"Give --format {named}, which holds it, or train with a"
