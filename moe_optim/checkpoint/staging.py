"""Values of a synchronous save, copied to the host one at a time, when Megatron's writer asks.

Megatron copies everything that a rank saves to the host before it writes the first byte. Here a
writing thread holds the chunk that it writes and the one before it; a chunk that lies contiguous in
host memory is written from there. Asynchronous saves copy everything, since a step may follow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from moe_optim.integration.engine import original

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"

_is_synchronous = False


@dataclass(kw_only=True)
class MadeTensor(ShardedTensor):
    """An entry to save whose values are made when they are written; until then on ``meta``."""

    make: Callable[[], Tensor]
    """Function that returns the values in host memory of their own."""

    def without_data(self) -> ShardedTensor:
        """Return the entry as other ranks see it."""
        known = {one.name: getattr(self, one.name) for one in fields(ShardedTensor)}
        return ShardedTensor(**{**known, "data": None})


@contextmanager
def synchronously() -> Iterator[None]:
    """Declare that saves planned in this context are written before their values change."""
    global _is_synchronous
    before, _is_synchronous = _is_synchronous, True
    try:
        yield
    finally:
        _is_synchronous = before


def prepare_write_data(self: Any, plan: SavePlan, planner: SavePlanner) -> None:
    """Assign the items of a plan to files; arguments are Megatron's. No rank communicates."""
    stock = original(f"{_WRITER}.prepare_write_data")
    if not _is_synchronous:
        stock(self, plan, planner)
        return
    stock(self, plan, _WithoutValues(planner))
    self.write_buckets = [
        (path, name, (objects, _Values([item for item, _ in tensors], planner)))
        for path, name, (objects, tensors) in self.write_buckets
    ]
    self.preload_tensors = lambda buckets, _: buckets  # which would copy all


class _WithoutValues:
    """A planner that resolves objects, and tensors to nothing."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner

    def resolve_data(self, item: WriteItem) -> Any:
        if item.type == WriteItemType.BYTE_IO:
            return self._planner.resolve_data(item)
        return torch.empty(0, dtype=torch.uint8, device="cpu")


class _Values:
    """Items of a file with their values, each made when it is reached."""

    def __init__(self, items: list[WriteItem], planner: SavePlanner) -> None:
        self._items, self._planner = items, planner

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[WriteItem, Tensor]]:
        for item in self._items:
            value: Any = self._planner.resolve_data(item)
            yield item, self._make(item) if value.is_meta else _on_host(value)

    def _make(self, item: WriteItem) -> Tensor:
        held = self._planner.state_dict[item.index.fqn]  # type: ignore[attr-defined]
        shards = [shard._sh_ten for shard in getattr(held, "_local_shards", [held])]
        return next(
            shard.make() for shard in shards if tuple(shard.global_offset) == item.index.offset
        )


def _on_host(value: Tensor) -> Tensor:
    """Return values in host memory that has nothing else, as ``torch.save`` writes all of it."""
    value = value.detach()
    if value.device.type != "cpu":
        is_quantized = value.device.type == "cuda" and "dequantize" in type(value).__dict__
        host: Tensor = (value.dequantize() if is_quantized else value).to("cpu")
        return host
    if value.untyped_storage().nbytes() == value.numel() * value.itemsize:
        return value
    if type(value) is not Tensor or not value.is_contiguous() or not value.numel():
        return value.clone(memory_format=torch.contiguous_format)
    memory = torch.from_numpy(value.view(-1).view(torch.uint8).numpy())  # a storage of its own
    return memory.view(value.dtype).view(value.shape)
