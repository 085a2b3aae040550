"""Plans of reads, in a time that grows with chunks rather than with pairs of them.

torch 2.11 sweeps over the longest axis of a tensor and compares each wanted chunk with all stored
ones that overlap it there. Of expert weights this is the rows or columns, which most chunks have
whole, so it compares nearly all pairs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

_PLAN = "create_read_items_for_chunk_list"
_FEW = 64
"""Stored chunks that torch may compare with each wanted one."""


@contextmanager
def plan_quickly() -> Iterator[None]:
    """Plan the reads of loads that begin within this context."""
    stock = getattr(planner_helpers, _PLAN, None)
    if stock is None:  # another version of torch
        yield
        return

    def plan(fqn: str, stored: TensorStorageMetadata, wanted: list[ChunkStorageMetadata]) -> Any:
        if len(stored.chunks) <= _FEW or not stored.size:
            return stock(fqn, stored, wanted)
        return list(_reads(stock, fqn, stored, wanted))

    setattr(planner_helpers, _PLAN, plan)
    try:
        yield
    finally:
        setattr(planner_helpers, _PLAN, stock)


def _reads(
    stock: Any, fqn: str, stored: TensorStorageMetadata, wanted: list[ChunkStorageMetadata]
) -> Iterator[ReadItem]:
    """Yield torch's reads of each wanted chunk, planned with the stored ones that overlap it."""
    starts = _numbers([chunk.offsets for chunk in stored.chunks])
    ends = starts + _numbers([chunk.sizes for chunk in stored.chunks])
    for number, chunk in enumerate(wanted):
        low = _numbers(chunk.offsets)
        high = low + _numbers(chunk.sizes)
        overlaps = ((starts < high) & (ends > low)).all(1).nonzero().view(-1).tolist()
        near = replace(stored, chunks=[stored.chunks[at] for at in overlaps])
        for read in stock(fqn, near, [chunk]):
            source, target = read.storage_index, read.dest_index
            yield replace(
                read,
                dest_index=MetadataIndex(target.fqn, target.offset, number),
                storage_index=MetadataIndex(source.fqn, source.offset, overlaps[source.index]),
            )


def _numbers(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
