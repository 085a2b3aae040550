"""The experts that a rank holds, and the tensors that each of them is exported as."""

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
from moe_optim.rollout.conventions import ONE_SCALE, Convention, choose_convention, find_convention
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
_Parts = list[dict[str, Tensor]]
"""Tensors of one expert by what replaces ``weight`` in names, for each part of its rows."""
StoredValues = QuantizedWeight | tuple[Tensor, Tensor] | list[Tensor]
"""Experts of a linear: quantized; codes and scale of one with per-tensor scaling; or one each."""


@dataclass(frozen=True, slots=True)
class ExportedAs:
    """Names of exported experts, the same on every rank."""

    layout: KeyLayout
    convention: str | None

    def names(self, held: HeldExperts, expert: int) -> list[str]:
        """Return the names of one expert's tensors, in the order in which they are exported."""
        return [template.format(expert=expert) for template in _templates(self, held)]

    def join(self, held: HeldExperts, ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensors of one expert, put together from those of the parts of each rank."""
        assert held.cut_axis is not None
        runs = 1  # of rows that each rank has a part of
        if held.linear.endswith(LINEARS[0]) and held.interleave is None:
            runs = 2 // self._count(held)
        cut = [[piece.chunk(runs) for piece in parts] for parts in zip(*ranks, strict=True)]
        return [
            torch.cat([piece[run] for run in range(runs) for piece in pieces], held.cut_axis)
            for pieces in cut
        ]

    def parts(self, held: HeldExperts, values: StoredValues) -> list[_Parts]:
        """Return the tensors of each expert in ``values``, part by part; views if possible."""
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
        """Return the prefix of the names of a layer's experts."""
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


@cache
def _infos_of(exported: ExportedAs, held: HeldExperts) -> list[list[tuple[str, TensorInfo]]]:
    """Return the same part by part, from an export of one expert without memory."""
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
    """Return the names of an expert's tensors, with ``{expert}`` in place of its number."""
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
    """A linear of experts on this rank, and the record of it for other ranks."""

    held: HeldExperts
    linear: ExpertLinear

    def locate(self, expert: int) -> tuple[int, int]:
        """Return the linear's tensor that holds an expert of the layer, and its index there."""
        index = expert - self.held.first
        return (0, index) if len(self._tensors) == 1 else (index, 0)

    def require_readable(self) -> None:
        """Check all tensors as :meth:`require_fresh` does one."""
        for place in range(len(self._tensors)):
            self.require_fresh(place)

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
        """Return the experts in one of the linear's tensors; this rank's parts of shared ones."""
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
    """Reads experts: takes a tensor apart at once, and keeps its experts until the next tensor."""

    exported: ExportedAs
    _read: tuple[ExportedLinear, int] | None = None
    _experts: list[_Parts] = field(default_factory=list)

    def read(self, local: ExportedLinear, expert: int) -> list[Tensor]:
        """Return one expert's tensors by its number in the layer; StateError if not readable."""
        place, index = local.locate(expert)
        if local.require_fresh(place) or self._read != (local, place):
            self._experts = self.exported.parts(local.held, local.values(place))
            self._read = (local, place)
        return [tensor for part in self._experts[index] for tensor in part.values()]


def local_experts(chunk: Any) -> Iterator[ExportedLinear]:
    """Yield the linears of experts of a chunk: weights, and biases where there are some.

    Raises:
        ConfigError: experts have adapters, are no pairs of gate and up, are cut into parts with
            global scales of their own, or have per-tensor scaling and elements of E5M2.
        LayoutError: experts are cut through blocks of scales.
        StateError: a quantized weight is not held by a bucket of this package.
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
    """Return the number of a linear's layer on disk, where MTP layers come last."""
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
            "would lack, got some around it. Merge them into the weights first, or export the "
            "model that they were put around, and the adapters by Megatron-Bridge."
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
    """Check that parts of experts are whole blocks along the axis that is cut.

    ``numel`` is the length of a part: rows (axis 0) of gate and as many of up, or columns (1).
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
