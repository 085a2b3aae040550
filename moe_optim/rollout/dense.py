"""Everything but experts, as Megatron's sharded state dict cuts it, and wholes of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import unwrap_model
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.rollout.buckets import TensorInfo
from moe_optim.rollout.units import HeldPart
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.te.fields import is_quantized, read_values, require_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalPart:
    """A part of a tensor on this rank, and what others are told of it."""

    held: HeldPart
    values: Tensor

    def read(self) -> Tensor:
        """Return the values, a view; those of quantized weights in bf16."""
        return _plain(self.values)


def local_parts(chunk: Any) -> Iterator[LocalPart]:
    """Yield what a chunk has besides experts, under the names of checkpoints. Nothing is sent.

    Raises:
        StateError: a tensor is offloaded, or a quantized one is behind its masters.
    """
    state = unwrap_model(chunk).sharded_state_dict()
    kept = {key: value for key, value in state.items() if not _is_of_experts(key, value)}
    apply_factories(kept)
    for one in nested_values(kept):
        if isinstance(one, ShardedTensor) and not isinstance(one.data, GroupedWeight):
            yield _part_of(one)


def _is_of_experts(key: str, value: Any) -> bool:
    """Return whether an entry is one of experts: theirs are exported from their buffers."""
    named = getattr(value, "key", key)
    return "experts" in f"{key}.{named}".split(".")


def _part_of(sharded: ShardedTensor) -> LocalPart:
    values, axes = sharded.data, sharded.prepend_axis_num
    name = _with_layer(sharded.key, sharded.global_offset[:axes])
    require_memory(f"export_weights: {name}", values)
    dtype = torch.bfloat16 if is_quantized(values) else values.dtype
    held = HeldPart(
        name=name,
        whole=TensorInfo(tuple(sharded.global_shape[axes:]), dtype),
        start=tuple(sharded.global_offset[axes:]),
        part=TensorInfo(tuple(sharded.local_shape), dtype),
    )
    return LocalPart(held=held, values=values)


def _with_layer(key: str, numbers: tuple[int, ...]) -> str:
    """Return the name with the layer that Megatron keeps as an axis of its own, if it does."""
    if not numbers:
        return key
    (number,) = numbers
    head, layers, tail = key.partition("layers.")
    return f"{head}{layers}{number}.{tail}"


def _plain(values: Tensor) -> Tensor:
    return read_values(values) if is_quantized(values) else values.detach()


class Wholes:
    """Tensors that are put together as their parts arrive."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Tensor, int]] = {}

    def add(self, held: HeldPart, values: Tensor) -> Tensor | None:
        """Take a part; return the whole once all of it has arrived, a view where it is one part."""
        if held.part.shape == held.whole.shape:
            return values
        if held.name not in self._open:
            shape, dtype = held.whole.shape, held.whole.dtype
            self._open[held.name] = torch.empty(shape, dtype=dtype, device=values.device), 0
        whole, arrived = self._open.pop(held.name)
        box = tuple(
            slice(start, start + size)
            for start, size in zip(held.start, held.part.shape, strict=True)
        )
        whole[box] = values
        arrived += values.numel()
        if arrived == whole.numel():
            return whole
        self._open[held.name] = whole, arrived
        return None

    def check_complete(self) -> None:
        """Raise StateError where a part of some tensor is on no rank."""
        if self._open:
            raise StateError(
                f"export_weights: expected all parts of {', '.join(sorted(self._open))}, got some. "
                "Every rank of the model must call it, with all of its chunks."
            )
