"""Plans of saves and reads, and the values of a save.

torch 2.11 sorts the chunks of a tensor along its longest axis, and compares each with all that
overlap it there. Of expert weights this is the rows or columns, which most chunks have whole, so it
compares nearly all pairs: 12,288 chunks took 47 s. Plans made here take a time that grows with
chunks.

Megatron copies everything that a rank saves to the host before it writes the first byte, and before
that all views with gaps, such as the gate rows of all experts. In a synchronous save here, a
writing thread holds the chunk that it writes and the one before it; a chunk that lies contiguous in
host memory is written from there. An asynchronous save copies all that a rank writes, since a step
may follow; Megatron itself copies views in host memory, but not tensors that have memory of their
own.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core.dist_checkpointing import state_dict_utils
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async, fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch import Tensor
from torch.distributed.checkpoint import default_planner, planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from moe_optim.checkpoint.files.archives import bytes_of
from moe_optim.checkpoint.files.metadata import MAX_CUT_AXES, require_tiling
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import original

logger = logging.getLogger(__name__)

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"

_NVRX_WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"

_FEW_SAVED, _FEW_STORED = 256, 64
"""Chunks of a tensor that torch may compare with each other, and with each wanted one."""


_is_synchronous = False


@contextmanager
def plan_quickly() -> Iterator[None]:
    """Plan the saves and loads that begin within this context."""
    with (
        replaced(default_planner, "_validate_global_plan", _validate),
        replaced(planner_helpers, "create_read_items_for_chunk_list", _plan),
    ):
        yield


@contextmanager
def replaced(module: Any, name: str, quick: Callable[..., Any]) -> Iterator[None]:
    """Have ``quick`` called in place of a function, with that as its first argument."""
    stock = getattr(module, name, None)
    if stock is None:  # another version of torch
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:  # binds as a method, where stock is one
        return quick(stock, *args, **kwargs)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, stock)


@contextmanager
def replaced_in_writers(name: str, quick: Callable[..., Any]) -> Iterator[None]:
    """Have ``quick`` called in place of a method of Megatron's writer, and of NVRx's.

    Megatron has imported ``nvidia-resiliency-ext`` where a compatible one is installed.
    """
    nvrx = sys.modules.get(_NVRX_WRITER)
    with ExitStack() as stack:
        for module in filter(None, (filesystem_async, nvrx)):
            stack.enter_context(replaced(module.FileSystemWriterAsync, name, quick))
        yield


def _validate(stock: Any, plans: Any, metadata: Metadata) -> bool:
    found = metadata.state_dict_metadata
    many = {
        key: tensor
        for key, tensor in found.items()
        if isinstance(tensor, TensorStorageMetadata)
        and len(tensor.chunks) > _FEW_SAVED
        and len(tensor.size) <= MAX_CUT_AXES
    }
    faulty = [key for key, tensor in many.items() if not is_tiled(tensor)]
    for key in faulty:
        logger.warning("%s: expected chunks that fill it without overlaps, got others", key)
    rest = {key: tensor for key, tensor in found.items() if key not in many}
    return bool(stock(plans, Metadata(rest))) and not faulty


def is_tiled(tensor: TensorStorageMetadata) -> bool:
    """Return whether chunks contain every element of a tensor once."""
    offsets = [tuple(chunk.offsets) for chunk in tensor.chunks]
    sizes = [tuple(chunk.sizes) for chunk in tensor.chunks]
    try:
        require_tiling("", offsets, sizes, tuple(tensor.size))
    except ValueError:
        return False
    return True


def _plan(
    stock: Any, fqn: str, stored: TensorStorageMetadata, wanted: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Return torch's reads of each wanted chunk, planned with the stored ones that overlap it."""
    if len(stored.chunks) <= _FEW_STORED or not stored.size:
        return list(stock(fqn, stored, wanted))
    starts = _numbers([chunk.offsets for chunk in stored.chunks])
    ends = starts + _numbers([chunk.sizes for chunk in stored.chunks])
    reads = []
    for number, chunk in enumerate(wanted):
        low = _numbers(chunk.offsets)
        high = low + _numbers(chunk.sizes)
        overlaps = ((starts < high) & (ends > low)).all(1).nonzero().view(-1).tolist()
        near = replace(stored, chunks=[stored.chunks[at] for at in overlaps])
        for read in stock(fqn, near, [chunk]):
            source, target = read.storage_index, read.dest_index
            reads.append(
                replace(
                    read,
                    dest_index=MetadataIndex(target.fqn, target.offset, number),
                    storage_index=MetadataIndex(source.fqn, source.offset, overlaps[source.index]),
                )
            )
    return reads


def _numbers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


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
    """Plan saves in this context: they are written before values change, or all is copied.

    Every rank must plan the same saves: an error of one rank is raised on all before Megatron
    communicates, or caches a plan.
    """
    global _is_synchronous
    before, _is_synchronous = _is_synchronous, is_synchronous
    try:
        with (
            replaced(state_dict_utils, "validate_sharding_integrity", _together),
            replaced(fully_parallel, "validate_sharding_integrity", _together),
            replaced(strategies, "mcore_to_pyt_state_dict", partial(_together, _converted)),
            replaced(strategies, "sharded_tensor_to_torch_sharded_tensor", with_views)
            if is_synchronous
            else nullcontext(),
            replaced_in_writers("prepare_write_data", _assigned),
        ):
            yield
    finally:
        _is_synchronous = before


def with_views(stock: Any, entries: list[ShardedTensor], *args: Any, **kwargs: Any) -> Any:
    """Return torch's form of entries, with views where Megatron would make contiguous copies."""
    views = {}
    for number, entry in enumerate(entries):
        if type(entry.data) is torch.Tensor and not entry.data.is_contiguous():
            views[number] = entry.data.view((1,) * entry.prepend_axis_num + entry.local_shape)
            entry.data = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    made = stock(entries, *args, **kwargs)
    for number, view in views.items():
        entries[number].data = made.local_shards()[number].tensor = view
    return made


def _together(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return agree(partial(function, *args, **kwargs), None)


def _assigned(stock: Any, self: Any, plan: SavePlan, planner: SavePlanner) -> None:
    """Assign the items of a plan to files, with the tensors of this save.

    NVRx would have its writer keep those of the first one, if plans are kept, and write them again:
    values of quantized weights are other tensors in every save.
    """
    self.use_cached_data_structure = False
    _together(stock, self, plan, planner)


def _converted(stock: Any, state_dict: dict[str, list[Any]], *args: Any, **kwargs: Any) -> Any:
    """Convert entries, by key; those of an asynchronous save are copies.

    The caller's entries stay views of what it trains, which it may save again.
    """
    if not _is_synchronous:
        for entries in state_dict.values():
            entries[:] = [_copied(entry) for entry in entries]
    return stock(state_dict, *args, **kwargs)


def _copied(entry: Any) -> Any:
    if isinstance(entry, MadeTensor):
        values = entry.make()
    elif isinstance(entry, ShardedTensor) and entry.data.device.type == "cpu":
        values = entry.data.detach().clone(memory_format=torch.contiguous_format)
    else:
        return entry
    held = copy(entry)
    held.data = values
    return held


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
    """Return contiguous values in host memory that has nothing else.

    ``torch.save`` writes all of it, in its order.
    """
    value = value.detach()
    if value.device.type != "cpu":
        is_quantized = value.device.type == "cuda" and "dequantize" in type(value).__dict__
        plain: Tensor = value.dequantize() if is_quantized else value
        return plain.to("cpu", memory_format=torch.contiguous_format)
    is_contiguous = value.is_contiguous()
    if is_contiguous and value.untyped_storage().nbytes() == value.numel() * value.itemsize:
        return value
    if type(value) is not Tensor or not is_contiguous or not value.numel():
        return value.clone(memory_format=torch.contiguous_format)
    memory = torch.frombuffer(bytes_of(value), dtype=torch.uint8)  # a storage of its own
    return memory.view(value.dtype).view(value.shape)
