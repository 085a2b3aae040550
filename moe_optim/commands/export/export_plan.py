"""What an export of a checkpoint will do, decided before a value is read or anything is written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_optim import ops
from moe_optim.checkpoint.files.reader import CheckpointReader, is_state
from moe_optim.commands.conversion.expert_finding import (
    check_row_order,
    find_experts,
    known_interleave,
    refuse_quantized,
    without_experts,
)
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.model_plan import ModelPlan, ModelRequest, Part, plan_model
from moe_optim.commands.conversion.model_sources import CONFIG, folder_of, read_config
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.conversion import convert_expert_set, interleave_faults
from moe_optim.experts.keys.finding import raise_faults
from moe_optim.experts.keys.layouts import LINEARS, ExpertSet, KeyLayout, get_layout
from moe_optim.formats import FORMATS, BlockScaledFormat, QuantizedWeight
from moe_optim.rollout.conventions import Convention, find_convention
from moe_optim.rollout.expert_tensors import export_experts, patterns_of, split_rows, tensor_name

MASTERS = "optimizer.state.param."
"""Before the names of weights, those of their masters, where these are stored by name."""
_GROUPED, _TARGET = get_layout("grouped"), get_layout("hf_per_expert")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What a user asks for; None where it follows from the checkpoint."""

    format: BlockScaledFormat
    convention: Convention
    source_layout: KeyLayout | None = None
    source_glu_interleave: int | None = None
    tokenizer: Path | None = None
    """Folder whose tokenizer files are passed on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerExperts:
    """The experts of one layer."""

    stored: ExpertSet
    """What is read: masters where there are some, else weights."""
    prefix: str
    """Of their names in the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Tensors that are no experts' and are read at once."""

    sources: tuple[str, ...]
    part: Part | None = None
    """What they become in Hugging Face's model; None: they are called as there already."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What goes where."""

    view: LayerView
    model: ModelPlan | None
    """What names Megatron's tensors for Hugging Face; None where they have those names."""
    request: ExportRequest
    experts: tuple[LayerExperts, ...]
    dense: tuple[Dense, ...]
    config: Mapping[str, Any]
    """Of the model, without ``quantization_config``."""
    interleave: int
    """Of the rows that are read."""

    @property
    def reads_masters(self) -> bool:
        """Whether experts are quantized from masters, as training quantizes them."""
        return all(one.stored.prefix.startswith(MASTERS) for one in self.experts)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is read."""
        dense = sum(self.view.nbytes(one.sources) for one in self.dense)
        return sum(map(self.experts_bytes, self.experts)) + dense

    @property
    def kept_interleave(self) -> int | None:
        """Of the rows that are quantized: blocks then hold the rows that they hold in training.

        None where scales of engines would be of gate and up together: these are told apart before.
        """
        fits = self.interleave % self.request.convention.scale_block[0] == 0
        return self.interleave if self.interleave and fits else None

    def experts_bytes(self, experts: LayerExperts) -> int:
        """Return the bytes of one layer's experts, as they are stored."""
        return self.view.nbytes(experts.stored.keys)

    def quantize(self, experts: LayerExperts) -> dict[str, Tensor]:
        """Read the experts of a layer and return their data and scales, expert by expert."""
        tensors = {key: self.view.read(key) for key in experts.stored.keys}
        found: dict[str, Tensor] = {}
        for expert in range(experts.stored.num_experts):
            one = convert_expert_set(
                tensors,
                experts.stored,
                _GROUPED,
                source_interleave=self.interleave or None,
                target_interleave=self.kept_interleave,
                experts=range(expert, expert + 1),
            )
            for linear in LINEARS:
                found |= self._export(experts, expert, linear, one)
        return found

    def _export(
        self, experts: LayerExperts, expert: int, linear: str, one: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one linear of one expert, [1, R, C] and maybe a bias [1, R]."""
        stem = f"{experts.stored.prefix}{linear}"
        values = one[f"{stem}.weight"].float()
        if not values.isfinite().all():
            raise StateError(
                f"{self.view.reader.path}: {stem}, expert {expert}: expected numbers, got Inf or "
                "NaN, which engines would spread to every token. Export an earlier checkpoint."
            )
        quantized = ops.quantize(values, self.request.format)
        parts = self.exported_parts(quantized, linear)
        for pattern, part in zip(patterns_of(_TARGET, linear, "weight"), parts, strict=True):
            for suffix, tensor in part.items():
                yield tensor_name(experts.prefix, pattern, expert, suffix), tensor
        if experts.stored.has_bias:
            patterns = patterns_of(_TARGET, linear, "bias")
            whole = one[f"{stem}.bias"].bfloat16()
            kept = self.kept_interleave if len(patterns) > 1 else None
            rows = [part[0] for part in split_rows(whole, len(patterns), kept)]
            for pattern, bias in zip(patterns, rows, strict=True):
                yield tensor_name(experts.prefix, pattern, expert, "bias"), bias

    def exported_parts(self, quantized: QuantizedWeight, linear: str) -> list[dict[str, Tensor]]:
        """Return data and scales of one expert, [1, R, C], for each part of its rows."""
        parts = len(patterns_of(_TARGET, linear, "weight"))
        return export_experts(
            quantized,
            self.request.convention,
            parts=parts,
            interleave=self.kept_interleave if parts > 1 else None,
            name=linear,
        )[0]

    def read_dense(self, dense: Dense) -> dict[str, Tensor]:
        """Read tensors and return them as Hugging Face's model has them."""
        if dense.part is not None and self.model is not None:
            return self.model.convert(dense.part)
        return {key: self.view.read(key) for key in dense.sources}

    def dense_files(self, most: int) -> Iterator[list[Dense]]:
        """Return what is no expert in groups of ``most`` bytes at most, but for larger tensors."""
        group: list[Dense] = []
        size = 0
        for one in self.dense:
            nbytes = self.view.nbytes(one.sources)
            if group and size + nbytes > most:
                yield group
                group, size = [], 0
            group.append(one)
            size += nbytes
        if group:
            yield group


def plan_export(
    reader: CheckpointReader, request: ExportRequest, config: Path | None = None
) -> ExportPlan:
    """Return the plan, without reading a value.

    Megatron's tensors are named by its arguments in the checkpoint; those of a checkpoint in
    safetensors keep their names, which must be Hugging Face's.

    Args:
        reader: of the checkpoint.
        request: what is asked for.
        config: ``config.json`` of the model; None takes what the checkpoint says.

    Raises:
        ConfigError: there is no configuration, no name for a tensor of Megatron's, or the request
            contradicts the checkpoint.
        LayoutError: experts are not complete, or do not fit the format.
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
    masters = _masters_in(model.view, request)
    found = [(part, part.experts) for part in model.parts if part.experts is not None]
    return ExportPlan(
        view=model.view,
        model=model,
        request=request,
        experts=_from_masters({part.target: one for part, one in found}, masters),
        dense=tuple(
            Dense(sources=part.sources, part=part) for part in model.parts if part.experts is None
        ),
        config={"torch_dtype": "bfloat16", **model.model.config} if config is None else config,
        interleave=model.source_interleave,
    )


def _plan_safetensors(
    reader: CheckpointReader, request: ExportRequest, config: Mapping[str, Any] | None
) -> ExportPlan:
    view, path = LayerView(reader), reader.path
    masters = _masters_in(view, request)
    keys = [key for key in view.tensors if not is_state(key)]
    refuse_quantized(view, keys)
    sets = find_experts(view, keys, layout=request.source_layout)
    if not sets:
        raise LayoutError(
            f"{path}: expected weights of gated experts, got none among {len(keys):,} tensors. "
            "`moe-optim inspect` shows what there is."
        )
    if named := [one.prefix for one in sets if one.prefix.startswith("decoder.")]:
        raise ConfigError(
            f"{path}: expected names of Hugging Face, which engines load, got Megatron's "
            f"{named[0]}*. Export the torch_dist checkpoint."
        )
    interleave = known_interleave(view, request.source_glu_interleave)
    check_row_order(view, interleave)
    return ExportPlan(
        view=view,
        model=None,
        request=request,
        experts=_from_masters({one.prefix: one for one in sets}, masters),
        dense=tuple(Dense(sources=(key,)) for key in without_experts(keys, sets)),
        config=read_config(folder_of(reader)) if config is None else config,
        interleave=interleave,
    )


def _masters_in(view: LayerView, request: ExportRequest) -> dict[str, ExpertSet]:
    """Return the masters of experts, by the prefix of their weights; none where they lie flat."""
    keys = [key for key in view.tensors if key.startswith(MASTERS)]
    sets = find_experts(view, keys, layout=request.source_layout)
    return {one.prefix.removeprefix(MASTERS): one for one in sets}


def _from_masters(
    weights: Mapping[str, ExpertSet], masters: Mapping[str, ExpertSet]
) -> tuple[LayerExperts, ...]:
    """Return what is read of each layer, by prefix in the result: masters of all, or of none."""
    complete = all(one.prefix in masters for one in weights.values())
    return tuple(
        LayerExperts(stored=masters[one.prefix] if complete else one, prefix=prefix)
        for prefix, one in weights.items()
    )


def _given_config(path: Path) -> dict[str, Any]:
    if path.name != CONFIG:
        raise ConfigError(
            f"--config {path}: expected a file called {CONFIG}, got {path.name}. Give that of the "
            "model."
        )
    return read_config(path.parent)


def _require_fits(plan: ExportPlan) -> None:
    """Raise LayoutError for what experts cannot become, before anything is read.

    That is rows that cannot alternate as they are said to, and shapes that the format cannot hold.
    """
    stored = [one.stored for one in plan.experts]
    raise_faults([f for one in stored for f in interleave_faults(one, plan.interleave or None)])
    block_rows, _ = plan.request.convention.scale_block
    for ffn, hidden in {(one.ffn, one.hidden) for one in stored}:
        where = f"{plan.view.reader.path}: "
        if ffn % block_rows:
            fitting = [name for name in FORMATS if _fits(FORMATS[name], ffn, hidden)]
            raise LayoutError(
                f"{where}linear_fc1: expected gate and up in runs of {block_rows} rows or a "
                f"multiple, the height of a block of scales, got {ffn} rows each. "
                f"{_advise(fitting)} --moe-ffn-hidden-size that is such a multiple."
            )
        _check_shapes(plan.request.format, ffn, hidden, where)


def _fits(format: BlockScaledFormat, ffn: int, hidden: int) -> bool:
    """Return whether experts of this size can be exported in a format."""
    try:
        _check_shapes(format, ffn, hidden)
    except LayoutError:
        return False
    return ffn % find_convention(format).scale_block[0] == 0


def _check_shapes(format: BlockScaledFormat, ffn: int, hidden: int, where: str = "") -> None:
    """Raise LayoutError for a linear that a format cannot hold."""
    format.check_shape((1, 2 * ffn, hidden), f"{where}linear_fc1")
    format.check_shape((1, hidden, ffn), f"{where}linear_fc2")


def _advise(formats: Sequence[str]) -> str:
    """Return what else to export, and the beginning of what else to train."""
    if not formats:
        return "Train with a"
    *others, last = formats
    named = f"{', '.join(others)} or {last}" if others else last
    return f"Give --format {named}, which holds it, or train with a"
