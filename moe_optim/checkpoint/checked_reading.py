"""What Megatron's loads read through: checksums are compared while bytes are read, and only once.

Replaces torch's reader of torch_dist files while a checkpoint is open in this package.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.metadata import Blob
from moe_optim.checkpoint.load_session import VettedReader
from moe_optim.checkpoint.plain_objects import plain_bytes
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import original

_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"

_open: tuple[VettedReader, Any] | None = None
"""Checkpoint that is being read through this package, if any, and the group that loads it."""


@contextmanager
def reading(stored: VettedReader | None, group: Any = None) -> Iterator[None]:
    """Have Megatron read a checkpoint through ``stored`` in this context; None changes nothing.

    ``group`` has the ranks that load it together.
    """
    global _open
    before, _open = _open, None if stored is None else (stored, group)
    try:
        yield
    finally:
        _open = before


def together(act: Callable[[], Any]) -> Any:
    """Call ``act``; in a load of states, raise an error of one rank on all."""
    return act() if _open is None else agree(act, _open[1])


def get_filesystem_reader(
    checkpoint_dir: str | Path, cache_metadata: bool = False, async_strategy: str = "mcore"
) -> Any:
    """Return the reader of a checkpoint; arguments are Megatron's."""
    if _open is not None and Path(checkpoint_dir) == _open[0].path:
        return CheckedReader(_open[0])
    stock = original(f"{_STRATEGIES}:_get_filesystem_reader")
    return stock(checkpoint_dir, cache_metadata, async_strategy)


def load_tensors(
    self: Any, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore"
) -> Any:
    """Load tensors and objects of this rank; arguments and result are Megatron's.

    While a checkpoint is open in this package, every rank must call it: an error is raised on all.
    """
    stock = original(f"{_STRATEGIES}:TorchDistLoadShardedStrategy.load")

    def act() -> Any:
        with own_errors():
            return stock(self, sharded_state_dict, checkpoint_dir, async_strategy)

    if _open is None:
        return stock(self, sharded_state_dict, checkpoint_dir, async_strategy)
    return together(act)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise the first error that torch has collected of all ranks instead of torch's around it."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class CheckedReader(FileSystemReader):
    """Reads an open checkpoint for torch; opens each file and reads each archive once."""

    def __init__(self, stored: VettedReader) -> None:
        super().__init__(stored.path)
        self._stored = stored

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata that was vetted."""
        return self._stored.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; StateError for damage, LayoutError for code in an object."""
        wanted: dict[Blob, list[ReadItem]] = defaultdict(list)
        blobs = {item.storage_index: self._stored.chunk(item.storage_index) for item in plan.items}
        for item in plan.items:
            wanted[blobs[item.storage_index]].append(item)
        in_order = sorted(wanted, key=lambda blob: (blob.file, blob.start))
        for name, of_file in groupby(in_order, key=lambda blob: blob.file):
            with self._stored.holding(name):
                for blob in of_file:
                    self._read(blob, wanted[blob], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, blob: Blob, items: list[ReadItem], planner: LoadPlanner) -> None:
        if items[0].type == LoadItemType.BYTE_IO:
            content = plain_bytes(self._stored, blob)
            for item in items:
                planner.load_bytes(item, io.BytesIO(content))
            return
        targets = [planner.resolve_tensor(item).detach() for item in items]
        with self._stored.opened(blob) as archive:
            _read_into(archive, blob, items, targets)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)


def _read_into(
    archive: Archive, blob: Blob, items: list[ReadItem], targets: list[torch.Tensor]
) -> None:
    if len(items) == 1 and _takes_all(blob, items[0], targets[0]):
        archive.read_tensor(blob.dtype, blob.shape, into=targets[0])
        return
    values = archive.read_tensor(blob.dtype, blob.shape)
    for item, target in zip(items, targets, strict=True):
        part = values
        for axis, (start, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            part = part.narrow(axis, start, length)
        target.copy_(part)


def _takes_all(blob: Blob, item: ReadItem, target: torch.Tensor) -> bool:
    """Return whether a target is memory that the archive can be read into as it lies."""
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.is_contiguous()
        and str(target.dtype) == blob.dtype
        and tuple(item.lengths) == blob.shape == tuple(target.shape)
    )
