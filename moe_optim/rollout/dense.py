"""Reads non-expert tensors through Megatron's sharded state dict, and reassembles them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import unwrap_model
from torch import Tensor

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.errors import StateError
from moe_optim.rollout.units import HeldPart
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.te.fields import is_quantized, read_values, require_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalPart:
    """A part of a tensor on this rank, and its record for other ranks."""

    held: HeldPart
    values: Tensor

    def read(self) -> Tensor:
        """Return the values as a view; quantized weights as bf16."""
        return read_values(self.values) if is_quantized(self.values) else self.values.detach()


def local_parts(chunk: Any) -> Iterator[LocalPart]:
    """Yield the non-expert tensors of a chunk, under checkpoint names.

    StateError for an offloaded tensor, or a quantized one older than its masters.
    """
    state = unwrap_model(chunk).sharded_state_dict()
    kept = {
        key: value
        for key, value in state.items()
        if "experts" not in f"{key}.{getattr(value, 'key', key)}".split(".")
    }
    apply_factories(kept)
    for one in nested_values(kept):
        if isinstance(one, ShardedTensor) and not isinstance(one.data, GroupedWeight):
            yield _part_of(one)


def _part_of(sharded: ShardedTensor) -> LocalPart:
    values, axes, name = sharded.data, sharded.prepend_axis_num, sharded.key
    if axes:  # Megatron prepends the layer number as an axis
        (number,) = sharded.global_offset[:axes]
        head, layers, tail = name.partition("layers.")
        name = f"{head}{layers}{number}.{tail}"
    require_memory(f"export_weights: {name}", values)
    dtype = torch.bfloat16 if is_quantized(values) else values.dtype
    held = HeldPart(
        name=name,
        whole=TensorInfo(tuple(sharded.global_shape[axes:]), dtype),
        start=tuple(sharded.global_offset[axes:]),
        part=TensorInfo(tuple(sharded.local_shape), dtype),
    )
    return LocalPart(held=held, values=values)


class Wholes:
    """Assembles tensors from their parts."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Tensor, int]] = {}

    def add(self, held: HeldPart, values: Tensor) -> Tensor | None:
        """Add a part; return the whole tensor after its last part, as a view if unsharded."""
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
        """Raise StateError if parts of any tensor are missing."""
        if self._open:
            raise StateError(
                f"export_weights: expected all parts of {', '.join(sorted(self._open))}, got some. "
                "Every rank of the model must call it, with all of its chunks."
            )
