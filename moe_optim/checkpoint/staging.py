"""Values of a save: copied to the host one at a time, when they are written, or all at once.

Megatron copies everything that a rank saves to the host before it writes the first byte. In a
synchronous save here, a writing thread holds the chunk that it writes and the one before it; a
chunk that lies contiguous in host memory is written from there. An asynchronous save copies all
that a rank writes, since a step may follow; Megatron itself copies views in host memory, but not
tensors that have memory of their own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from moe_optim.checkpoint.quick_plans import replaced
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
def staging(*, is_synchronous: bool) -> Iterator[None]:
    """Plan saves in this context: they are written before values change, or all is copied."""
    global _is_synchronous
    before, _is_synchronous = _is_synchronous, is_synchronous
    copying = replaced(strategies, "mcore_to_pyt_state_dict", _copied)
    try:
        with nullcontext() if is_synchronous else copying:
            yield
    finally:
        _is_synchronous = before


def _copied(stock: Any, state_dict: dict[str, list[Any]], *args: Any, **kwargs: Any) -> Any:
    """Copy what lies in host memory of the entries that this rank writes, by key."""
    for entry in chain(*state_dict.values()):
        if isinstance(entry, MadeTensor):
            entry.data = entry.make()
        elif isinstance(entry, ShardedTensor) and entry.data.device.type == "cpu":
            entry.data = entry.data.detach().clone(memory_format=torch.contiguous_format)
    return stock(state_dict, *args, **kwargs)


def prepare_write_data(self: Any, plan: SavePlan, planner: SavePlanner) -> None:
    """Assign the items of a plan to files; arguments are Megatron's. No rank communicates."""
    stock = original(f"{_WRITER}.prepare_write_data")
    self.write_preloaded_data_multithread = write_files
    if not _is_synchronous:
        stock(self, plan, planner)
        return
    # no process that keeps results, nor any that a failed save leaves for the next one
    with replaced(filesystem_async, "get_write_results_queue", lambda _: SimpleQueue()):
        stock(self, plan, _WithoutValues(planner))
    self.write_buckets = [
        (path, name, (objects, _Values([item for item, _ in tensors], planner)))
        for path, name, (objects, tensors) in self.write_buckets
    ]
    self.preload_tensors = lambda buckets, _: buckets  # which would copy all


def write_files(
    transforms: Any, use_msc: bool, _rank: int, buckets: list[Any], results: Any
) -> None:
    """Write each file in a thread; put what was written, or all errors, into ``results``.

    Arguments are Megatron's, whose function keeps only the type of an error.
    """
    write = partial(
        filesystem_async.FileSystemWriterAsync.write_preloaded_data,
        transforms,
        results_queue=None,
        count_queue=None,
        use_fsync=True,
        use_msc=use_msc,
    )
    with filesystem_async._disable_gc(), ThreadPoolExecutor(len(buckets)) as threads:
        written: dict[int, Any] = dict(threads.map(write, range(len(buckets)), buckets))
    failures = [
        f"{buckets[number][1]}: {described(error)}"
        for number, error in written.items()
        if isinstance(error, Exception)
    ]
    results.put(RuntimeError("; ".join(failures)) if failures else written)


def described(error: BaseException) -> str:
    """Return an error and what it was raised after: torch hides why a file cannot be written."""
    text, before = f"{type(error).__name__}: {error}", error.__context__
    return text if before is None else f"{text}, after {described(before)}"


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
