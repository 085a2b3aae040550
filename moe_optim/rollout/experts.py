"""Finds a rank's experts and reads their buffers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_optim.calibration.calibrated_amax import calibrated_input_amax
from moe_optim.calibration.linears import ExpertLinear, expert_linears, members_of
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.layouts import LINEARS
from moe_optim.experts.sharding import CUTS
from moe_optim.formats import get_format
from moe_optim.rollout.expert_tensors import rowwise_of
from moe_optim.rollout.units import HeldExperts
from moe_optim.weights.managed import storage_of
from moe_optim.weights.names import modules_by_name, with_global_layers
from moe_optim.weights.steps import steps_of
from moe_optim.weights.storage import WeightStorage
from moe_optim.weights.te.fields import (
    TENSORWISE,
    foreign_element,
    is_grouped,
    is_tensorwise,
    require_memory,
    te_formats_of,
)
from moe_optim.weights.te.tensorwise import codes_and_scale

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.)?mlp\.experts\.\w+")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportedLinear:
    """An expert linear on this rank, and its record for other ranks."""

    held: HeldExperts
    linear: ExpertLinear
    chunk: Any
    """Model chunk of the linear."""

    def require_readable(self) -> int:
        """Raise StateError for unreadable weights; read scales of frozen ones anew.

        Returns:
            Version of the weights, which another step changes, and another load if they are
            quantized.
        """
        for storage in self._storages:
            _require_fresh(storage)
            storage.read_anew()
        for tensor in () if self._storages else self._tensors:
            require_memory(f"export_weights: {self.held.linear}", tensor)
        return self._version

    def require_unchanged(self, version: int) -> None:
        """Raise StateError if quantized weights are behind their masters, offloaded, or others.

        ``version`` is that of :meth:`require_readable`.
        """
        for storage in self._storages:
            storage.require_fresh()
        if self._version != version:
            raise StateError(
                f"export_weights: {self.held.linear}: expected the weights of the beginning, got "
                "those of a later step. Take no step, and load nothing, before the iterator is "
                "exhausted, and begin again."
            )

    @property
    def _version(self) -> int:
        versions = [storage.version for storage in self._storages]
        return steps_of(self.chunk) + max(versions, default=0)

    def buffers(self, start: int, stop: int) -> list[Tensor]:
        """Return this rank's buffers of some of its experts: views, or copies of several tensors.

        StateError if the weights are behind their masters, or offloaded.
        """
        tensors = self._tensors
        if len(tensors) == 1:
            whole = self._read(tensors[0])
            return whole if stop - start == self.held.count else [one[start:stop] for one in whole]
        if stop - start == 1:
            return self._read(tensors[start])
        return [torch.cat(one) for one in zip(*map(self._read, tensors[start:stop]), strict=True)]

    def _read(self, tensor: Any) -> list[Tensor]:
        """Return the buffers of one tensor, [E, ...]."""
        if self._storages:
            storage: Any = storage_of(tensor)
            _require_fresh(storage)
            return rowwise_of(storage.quantized)
        if self.held.format == TENSORWISE:
            codes, scale_inv = codes_and_scale(tensor)
            return [codes.unsqueeze(0), scale_inv]
        require_memory(f"export_weights: {self.held.linear}", tensor)
        if is_grouped(tensor):
            return [torch.stack(list(members_of(tensor)))]
        values = tensor.detach()
        return [values.unsqueeze(0) if values.dim() == len(self.held.shape) else values]

    @cached_property
    def _tensors(self) -> list[Any]:
        """Weights or biases, one of all experts or one each."""
        return self.linear.weights() if self.held.kind == "weight" else biases_of(self.linear)

    @cached_property
    def _storages(self) -> list[WeightStorage]:
        """Storage of each quantized weight of this package; none of others."""
        if self.held.format in ("bf16", TENSORWISE):
            return []
        return [one for one in map(storage_of, self._tensors) if one is not None]


def _require_fresh(storage: WeightStorage) -> None:
    storage.require_fresh()
    if storage.has_moved():
        storage.take_over()


def local_experts(chunk: Any, *, with_input_amaxes: bool = False) -> Iterator[ExportedLinear]:
    """Yield the expert linears of a chunk: weights, and any biases.

    Records hold calibrated amaxes of inputs only ``with_input_amaxes``: then another calibration
    makes other records.

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
            facts |= {"cut_axis": axis, "cuts": 1 if axis is None else size}
            amax = calibrated_input_amax(linear.module) if with_input_amaxes else None
            facts["input_amax"] = None if amax is None or kind == "bias" else amax.item()
            held = HeldExperts(kind=kind, shape=whole, format=stored_as, **facts)
            yield ExportedLinear(held=held, linear=linear, chunk=chunk)


def _hf_layer(path: str, config: Any) -> int | None:
    """Return the Hugging Face layer number of a linear, where MTP layers come last."""
    found = _LAYER.fullmatch(path)
    if found is None or (found[1] == "mtp" and config is None):
        return None
    return int(found[2]) + (config.num_layers if found[1] == "mtp" else 0)


def biases_of(linear: ExpertLinear) -> list[Tensor]:
    """Return the biases of a linear in expert order, one of all experts or one each."""
    named = linear.module._parameters.items()
    return [p for name, p in named if name.startswith("bias") and p is not None and p.numel()]


def _kind_of(linear: ExpertLinear, path: str) -> tuple[tuple[int, ...], str]:
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
            f"export_weights: {path}: expected one {scale} per expert, got {cut}, where every "
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
