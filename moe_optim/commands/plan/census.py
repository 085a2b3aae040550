"""Shard sizes of a bucket for all ranks at once.

Vectorized over ranks, so that 100,000 ranks are counted as fast as two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_optim.buckets.layout import Slot
from moe_optim.formats import BlockScaledFormat

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockRowCounts:
    """Block rows owned by each rank of a bucket, whole or in part."""

    whole: Counts
    """[dp_size] int64: block rows that are entirely in the shard of a rank."""
    has_cut: NDArray[np.bool_]
    """[dp_size] bool: whether a rank owns only a part of some block row."""


def count_owned(slots: Sequence[Slot], bucket_numel: int, dp_size: int) -> Counts:
    """Return the number of parameter elements in the shard of each rank, [dp_size] int64.

    Shards are equal parts of the bucket; gaps between ``slots`` are padding.
    """
    edges = _Edges(slots, bucket_numel, dp_size)
    return np.diff(edges.before([slot.numel for slot in edges.slots]) + edges.offset)


def count_block_rows(
    format: BlockScaledFormat, slots: Sequence[Slot], bucket_numel: int, dp_size: int
) -> BlockRowCounts:
    """Count whole and cut block rows; other arguments are those of :func:`count_owned`."""
    edges = _Edges(slots, bucket_numel, dp_size)
    block_rows = [-(-slot.shape[1] // format.block_row_height) for slot in edges.slots]
    before = edges.before(
        [slot.shape[0] * count for slot, count in zip(edges.slots, block_rows, strict=True)]
    )
    rows = edges.of_each([slot.shape[1] for slot in edges.slots])
    cols = edges.of_each([slot.shape[2] for slot in edges.slots])
    expert = edges.offset // (rows * cols)
    inside = edges.offset - expert * rows * cols
    ended_here = inside // (cols * format.block_row_height)
    rest = inside - ended_here * cols * format.block_row_height
    ended = before + expert * edges.of_each(block_rows) + ended_here  # at an edge or before
    begun = ended + (rest > 0)  # before an edge
    # Block rows follow each other: those that end in a shard and begin in it are whole
    is_inside = begun > ended
    return BlockRowCounts(
        whole=np.maximum(ended[1:] - begun[:-1], 0), has_cut=is_inside[:-1] | is_inside[1:]
    )


class _Edges:
    """Positions of the shard edges among the parameters of a bucket."""

    def __init__(self, slots: Sequence[Slot], bucket_numel: int, dp_size: int) -> None:
        self.slots = sorted(slots, key=lambda slot: slot.start)
        edges = np.arange(dp_size + 1, dtype=np.int64) * (bucket_numel // dp_size)
        starts = np.array([slot.start for slot in self.slots], dtype=np.int64)
        numels = np.array([slot.numel for slot in self.slots], dtype=np.int64)
        self.index = np.maximum(np.searchsorted(starts, edges, side="right") - 1, 0)
        """Index of the last parameter that begins at or before each edge."""
        self.offset: Counts = np.clip(edges - starts[self.index], 0, numels[self.index])
        """Elements of that parameter before the edge."""

    def of_each(self, values: Sequence[int]) -> Counts:
        """Return the value of the parameter at each edge."""
        return np.asarray(np.array(values, dtype=np.int64)[self.index])

    def before(self, sizes: Sequence[int]) -> Counts:
        """Return the total size of all parameters before the one at each edge."""
        total = np.array(sizes, dtype=np.int64)
        return np.asarray((total.cumsum() - total)[self.index])
