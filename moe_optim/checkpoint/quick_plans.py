"""Plans of saves and reads, in a time that grows with chunks rather than with pairs of them.

torch 2.11 sorts the chunks of a tensor along its longest axis, and compares each with all that
overlap it there. Of expert weights this is the rows or columns, which most chunks have whole, so it
compares nearly all pairs: 12,288 chunks took 47 s.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from moe_optim.checkpoint.files.metadata import MAX_CUT_AXES, require_cover

logger = logging.getLogger(__name__)

_FEW_SAVED, _FEW_STORED = 256, 64
"""Chunks of a tensor that torch may compare with each other, and with each wanted one."""


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
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
    try:
        require_cover("", boxes, tuple(tensor.size))
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


def _numbers(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
