"""Reads a rank's experts and converts each to its exported tensors."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from moe_optim.calibration.linears import ExpertLinear, expert_linears, members_of
from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.layouts import LINEARS, KeyLayout
from moe_optim.experts.sharding import CUTS
from moe_optim.formats import QuantizedWeight, get_format
from moe_optim.rollout.conventions import (
    CONVENTIONS,
    ONE_SCALE,
    Convention,
    choose_convention,
    find_convention,
)
from moe_optim.rollout.expert_tensors import (
    export_expert_of_one_scale,
    export_experts,
    patterns_of,
    split_rows,
    tensor_template,
)
from moe_optim.rollout.families import expert_prefixes
from moe_optim.rollout.units import HeldExperts
from moe_optim.weights.managed import storage_of
from moe_optim.weights.names import modules_by_name, with_global_layers
from moe_optim.weights.storage import WeightStorage
from moe_optim.weights.te.fields import (
    TENSORWISE,
    foreign_element,
    is_tensorwise,
    require_memory,
    te_formats_of,
)
from moe_optim.weights.te.tensorwise import codes_and_scale

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.)?mlp\.experts\.\w+")
_SHAPES = {one.shape for one in CONVENTIONS}
"""Suffixes of tensors that store the shape of a weight."""
_Parts = list[dict[str, Tensor]]
"""Tensors of an expert by name suffix, per row part."""
StoredValues = QuantizedWeight | tuple[Tensor, Tensor] | list[Tensor]
"""Expert values of a linear: quantized; codes and scale with per-tensor scaling; or one tensor
each."""


@dataclass(frozen=True, slots=True)
class ExportedAs:
    """Naming of exported experts, the same on every rank."""

    layout: KeyLayout
    convention: str | None

    def names(self, held: HeldExperts, expert: int) -> list[str]:
        """Return the names of an expert's tensors, in export order."""
        return [template.format(expert=expert) for template in _templates(self, held)]

    def join(self, held: HeldExperts, ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensors of one expert, concatenated from each rank's parts."""
        assert held.cut_axis is not None
        runs = 1  # row blocks that are sharded separately
        if held.linear.endswith(LINEARS[0]) and held.interleave is None:
            runs = 2 // self._count(held)
        suffixes = [suffix for suffix, _ in self.infos(held)]
        return [
            _added(pieces, held.cut_axis)
            if suffix in _SHAPES
            else _joined(pieces, held.cut_axis, runs)
            for suffix, *pieces in zip(suffixes, *ranks, strict=True)
        ]

    def parts(self, held: HeldExperts, values: StoredValues) -> list[_Parts]:
        """Return the tensors of each expert in ``values``, by part; views where possible."""
        count, interleave = self._count(held), held.interleave
        if isinstance(values, QuantizedWeight):
            convention = self.convention_of(held.format)
            return export_experts(
                values, convention, parts=count, interleave=interleave, name=held.linear
            )
        if isinstance(values, tuple):
            convention = self.convention_of(TENSORWISE)
            return [
                export_expert_of_one_scale(*values, convention, parts=count, interleave=interleave)
            ]
        return [
            [{held.kind: part[0]} for part in split_rows(one.unsqueeze(0), count, interleave)]
            for one in values
        ]

    def convention_of(self, format: str) -> Convention:
        """Return the convention for weights of a training format."""
        if format == TENSORWISE:
            return choose_convention([ONE_SCALE], self.convention, format)
        return find_convention(get_format(format), self.convention)

    def infos(self, held: HeldExperts) -> list[tuple[str, TensorInfo]]:
        """Return suffix, shape and dtype of the tensors of each expert of a linear."""
        return [one for part in _infos_of(self, replace(held, first=0, count=1)) for one in part]

    def _count(self, held: HeldExperts) -> int:
        linear = held.linear.rpartition(".")[2]
        return len(patterns_of(self.layout, linear, held.kind))

    def prefix(self, held: HeldExperts) -> str:
        """Return the name prefix of a layer's experts."""
        container = held.linear.rpartition(".")[0]
        if self.layout.name == "sequential":
            return f"{container}."
        if held.hf_layer is not None:
            return expert_prefixes(held.hf_layer)[1]
        raise ConfigError(
            f"export_weights: layout {self.layout.name}: expected experts of decoder.layers.N.mlp "
            f"or of a layer that predicts further tokens, got {container}, for which Hugging "
            "Face's models have no name here. Export in layout sequential, which keeps Megatron's "
            "names."
        )


def _added(shapes: Sequence[Tensor], axis: int) -> Tensor:
    """Return rows and columns of a whole weight, given those of its parts."""
    whole = shapes[0].clone()
    whole[axis] = sum(shape[axis] for shape in shapes)
    return whole


def _joined(pieces: Sequence[Tensor], axis: int, runs: int) -> Tensor:
    """Join a tensor's parts of all ranks, each with ``runs`` row blocks."""
    cut = [piece.chunk(runs) for piece in pieces]
    return torch.cat([piece[run] for run in range(runs) for piece in cut], axis)


@cache
def _infos_of(exported: ExportedAs, held: HeldExperts) -> list[list[tuple[str, TensorInfo]]]:
    """Return suffix, shape and dtype by part, from exporting one expert on ``meta``."""
    values: StoredValues
    if held.format == "bf16":
        values = [torch.empty(held.shape, dtype=torch.bfloat16, device="meta")]
    elif held.format == TENSORWISE:
        codes = torch.empty(held.shape, dtype=torch.uint8, device="meta")
        values = codes, torch.empty(1, dtype=torch.float32, device="meta")
    else:
        values = QuantizedWeight.empty(get_format(held.format), (1, *held.shape), device="meta")
    (parts,) = exported.parts(held, values)
    return [
        [(name, TensorInfo(tuple(one.shape), one.dtype)) for name, one in part.items()]
        for part in parts
    ]


@cache
def _templates(exported: ExportedAs, held: HeldExperts) -> list[str]:
    """Return the names of an expert's tensors, with the placeholder ``{expert}``."""
    linear = held.linear.rpartition(".")[2]
    prefix = exported.prefix(held)
    patterns = patterns_of(exported.layout, linear, held.kind)
    parts = _infos_of(exported, replace(held, first=0, count=1))
    return [
        prefix + tensor_template(pattern, suffix)
        for pattern, part in zip(patterns, parts, strict=True)
        for suffix, _ in part
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportedLinear:
    """An expert linear on this rank, and its record for other ranks."""

    held: HeldExperts
    linear: ExpertLinear

    def locate(self, expert: int) -> tuple[int, int]:
        """Return the index of the tensor that contains an expert, and the expert's index in it."""
        index = expert - self.held.first
        return (0, index) if len(self._tensors) == 1 else (index, 0)

    def require_readable(self) -> None:
        """Call :meth:`require_fresh` for all tensors, and read scales of frozen ones anew."""
        for place in range(len(self._tensors)):
            self.require_fresh(place)
            if (storage := self._storage(place)) is not None:
                storage.read_anew()

    def require_fresh(self, place: int) -> bool:
        """Return whether a tensor has moved since the last call; StateError if unreadable."""
        storage = self._storage(place)
        if storage is None:
            require_memory(f"export_weights: {self.held.linear}", self._tensors[place])
            return False
        storage.require_fresh()
        has_moved = storage.has_moved()
        if has_moved:
            storage.take_over()
        return has_moved

    def values(self, place: int) -> StoredValues:
        """Return the experts in one of the linear's tensors; this rank's parts of sharded ones."""
        storage, tensor = self._storage(place), self._tensors[place]
        if storage is not None:
            return storage.quantized
        if self.held.format == TENSORWISE:
            return codes_and_scale(tensor)
        values = tensor.detach()
        return [values] if values.dim() == len(self.held.shape) else list(members_of(values))

    @cached_property
    def _tensors(self) -> list[Any]:
        """Weights or biases, one of all experts or one each."""
        return self.linear.weights() if self.held.kind == "weight" else biases_of(self.linear)

    def _storage(self, place: int) -> WeightStorage | None:
        has_none = self.held.format in ("bf16", TENSORWISE)
        return None if has_none else storage_of(self._tensors[place])


@dataclass(kw_only=True)
class ExpertReader:
    """Reads experts one by one; caches the split of the current tensor."""

    exported: ExportedAs
    _read: tuple[ExportedLinear, int] | None = None
    _experts: list[_Parts] = field(default_factory=list)

    def read(self, local: ExportedLinear, expert: int) -> list[Tensor]:
        """Return an expert's tensors by its index in the layer; StateError if unreadable."""
        place, index = local.locate(expert)
        if local.require_fresh(place) or self._read != (local, place):
            self._experts = self.exported.parts(local.held, local.values(place))
            self._read = (local, place)
        return [tensor for part in self._experts[index] for tensor in part.values()]


def local_experts(chunk: Any) -> Iterator[ExportedLinear]:
    """Yield the expert linears of a chunk: weights, and any biases.

    Raises:
        ConfigError: experts have adapters, no gate, shards with separate global scales, or
            per-tensor scaling of E5M2.
        LayoutError: shard boundaries cross scale blocks.
        StateError: a quantized weight is not in a bucket of this package.
    """
    modules = modules_by_name(chunk)
    for linear in expert_linears(chunk):
        path = with_global_layers(linear.name, modules)
        config = getattr(modules.get(linear.name.rpartition(".")[0]), "config", None)
        _require_exportable(linear, path, config)
        name = path.rpartition(".")[2]
        shape, format = _kind_of(linear, path)
        facts: dict[str, Any] = {
            "linear": path,
            "hf_layer": _hf_layer(path, config),
            "first": linear.groups.ep.rank() * linear.num_experts,
            "count": linear.num_experts,
        }
        if path.endswith(LINEARS[0]):
            facts["interleave"] = getattr(config, "moe_mlp_glu_interleave_size", None)
        size = linear.groups.expt_tp.size()
        shapes = {"weight": (shape, format)}
        if biases_of(linear):
            shapes["bias"] = shape[:1], "bf16"
        for kind, (part, stored_as) in shapes.items():
            axis = CUTS[f"{name}.{kind}"][0] if size > 1 else None
            if axis is not None:
                _require_joinable(path, stored_as, part[axis], axis, size)
            whole = tuple(n * size if axis == at else n for at, n in enumerate(part))
            held = HeldExperts(kind=kind, shape=whole, format=stored_as, cut_axis=axis, **facts)
            yield ExportedLinear(held=held, linear=linear)


def _hf_layer(path: str, config: Any) -> int | None:
    """Return the Hugging Face layer number of a linear, where MTP layers come last."""
    found = _LAYER.fullmatch(path)
    if found is None or (found[1] == "mtp" and config is None):
        return None
    return int(found[2]) + (config.num_layers if found[1] == "mtp" else 0)


def biases_of(linear: ExpertLinear) -> list[Tensor]:
    """Return the biases of a linear in expert order, one of all experts or one each."""
    named = linear.module.named_parameters(recurse=False)
    return [param for name, param in named if name.startswith("bias") and param.numel()]


def _kind_of(linear: ExpertLinear, path: str) -> tuple[tuple[int, ...], str]:
    """Return the shape of one expert, and the format of all."""
    weights = linear.weights()
    if any(map(is_tensorwise, weights)):
        if element := next(filter(None, map(foreign_element, weights)), None):
            raise ConfigError(
                f"export_weights: {path}: expected elements of E4M3, got {element}, which no "
                "engine reads weights in. Train with --fp8-format hybrid or e4m3."
            )
        return tuple(weights[0].shape[-2:]), TENSORWISE
    storages = [storage_of(weight) for weight in weights]
    if None in storages and te_formats_of(weights[storages.index(None)]):
        raise StateError(
            f"export_weights: {path}: expected quantized weights of the installed format, got "
            f"{type(weights[0]).__name__}. Call moe_optim.install() before the model is built."
        )
    formats = {"bf16" if storage is None else storage.format.name for storage in storages}
    return tuple(weights[0].shape[-2:]), formats.pop()


def _require_exportable(linear: ExpertLinear, path: str, config: Any) -> None:
    if linear.is_adapted:
        raise ConfigError(
            f"export_weights: {path}: expected experts without adapters, whose part an engine "
            "would lack, got some around it. Call moe_optim.merge_adapters(model_chunks) first, or "
            "export the model that they were put around, and the adapters by Megatron-Bridge."
        )
    if not path.endswith(LINEARS):
        raise LayoutError(
            f"export_weights: {path}: expected experts of linear_fc1 and linear_fc2, got a linear "
            "of another name. Export what Megatron's MoE layers hold."
        )
    if path.endswith(LINEARS[0]) and config is not None and not config.gated_linear_unit:
        raise ConfigError(
            f"export_weights: {path}: expected gate and up rows, got experts without a gate. Train "
            "with --swiglu."
        )


def _require_joinable(path: str, format: str, numel: int, axis: int, size: int) -> None:
    """Check that expert shards consist of whole blocks along the sharded axis.

    ``numel`` is the length of a shard: gate plus up rows (axis 0), or columns (1).
    """
    if format == "bf16":
        return
    cut = f"--expert-tensor-parallel-size {size}"
    remedy = "Train with 1, or save a checkpoint and use moe-optim export."
    if format == TENSORWISE or get_format(format).has_global_amax:
        scale = "scale" if format == TENSORWISE else "global scale"
        raise ConfigError(
            f"export_weights: {path}: expected one {scale} an expert, got {cut}, where every "
            f"part of an expert has its own. {remedy}"
        )
    block = get_format(format).rowwise_block[axis]
    length = numel if axis else numel // 2
    if length % block:
        what = ("rows of gate and of up", "columns")[axis]
        raise LayoutError(
            f"export_weights: {path}: expected {what} of each rank in multiples of {block}, a "
            f"block of {format}, got {length} with {cut}. {remedy}"
        )
