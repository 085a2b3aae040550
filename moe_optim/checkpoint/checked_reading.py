"""What Megatron's loads read through: checksums are compared while bytes are read, and only once.

Replaces torch's reader of torch_dist files while a checkpoint is open in this package. Megatron
unpickles objects without restrictions, so those that would run code are refused.
"""

import dataclasses
import enum
import io
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.metadata import Blob
from moe_optim.checkpoint.files.pickles import MEGATRONS_PACKAGES, Named, foreign_name
from moe_optim.checkpoint.load_session import VettedReader
from moe_optim.checkpoint.quick_plans import replaced
from moe_optim.errors import LayoutError
from moe_optim.integration.agreement import agree
from moe_optim.integration.engine import original
from moe_optim.integration.installation import config_or_bf16

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
        with replaced(strategies, "sharded_tensor_to_torch_sharded_tensor", _with_views):
            yield
    finally:
        _open = before


def _with_views(stock: Any, entries: list[ShardedTensor], *args: Any, **kwargs: Any) -> Any:
    """Have entries read into the memory that they are parts of; Megatron reads into copies."""
    views = {}
    for number, entry in enumerate(entries):
        if type(entry.data) is torch.Tensor and not entry.data.is_contiguous():
            views[number] = entry.data.view((1,) * entry.prepend_axis_num + entry.local_shape)
            entry.data = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    made = stock(entries, *args, **kwargs)
    for number, view in views.items():
        entries[number].data = made.local_shards()[number].tensor = view
    return made


def together(act: Callable[[], Any]) -> Any:
    """Call ``act``; in a load of states, raise an error of one rank on all."""
    return act() if _open is None else agree(act, _open[1])


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise the first error that torch has collected of all ranks instead of torch's around it."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


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

    @own_errors()
    def act() -> Any:
        return stock(self, sharded_state_dict, checkpoint_dir, async_strategy)

    if _open is None:
        return stock(self, sharded_state_dict, checkpoint_dir, async_strategy)
    return together(act)


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
            content = _plain_bytes(self._stored, blob)
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
        for axis, start in enumerate(item.storage_offsets):
            part = part.narrow(axis, start, item.lengths[axis])
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


def _plain_bytes(stored: VettedReader, blob: Blob) -> bytes:
    """Return an object as it is stored, once its checksums fit.

    LayoutError if its unpickling would run code, unless ``trust_checkpoint_code`` allows that.
    """
    content = stored.read_bytes(blob)
    if config_or_bf16().trust_checkpoint_code:
        return content
    why = foreign_name(Archive(io.BytesIO(content)).pickled(), _is_passive)
    if why is not None:
        raise LayoutError(
            f"{stored.path / blob.file}: {blob.key}: expected plain data, got an object that "
            f"Megatron would run code for while it loads: {why}. If you trust its author (types of "
            "your own among its arguments are such code, too), set "
            "moe_optim.trust_checkpoint_code=true; else load another checkpoint."
        )
    return content


def _is_passive(named: Named) -> bool:
    """Return whether a name is an enumeration or dataclass of Megatron's packages.

    Considers loaded modules only: a checkpoint cannot cause an import.
    """
    found = getattr(sys.modules.get(named.module), named.name, None)
    if not isinstance(found, type):
        return False
    # check the class's own module, too: modules may re-export foreign classes
    packages = {module.partition(".")[0] for module in (named.module, found.__module__)}
    is_value = issubclass(found, enum.Enum) or dataclasses.is_dataclass(found)
    return is_value and packages <= MEGATRONS_PACKAGES
