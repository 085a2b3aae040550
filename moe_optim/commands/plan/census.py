"""What each of many ranks owns of a bucket, counted for all of them at once.

Sizes alone, as vectors over ranks, so that a bucket of 100,000 ranks is counted as fast as one of
two.
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
    """Block rows of a bucket by the rank that owns them, in whole or in part."""

    whole: Counts
    """[dp_size] int64: block rows that lie entirely in the shard of a rank."""
    has_cut: NDArray[np.bool_]
    """[dp_size] bool: whether a rank owns a part of some block row, and others the rest of it."""


def count_owned(slots: Sequence[Slot], bucket_numel: int, dp_size: int) -> Counts:
    """Return how many elements of parameters lie in the shard of each rank.

    Args:
        slots: parameters of the bucket, at least one; gaps between them are padding.
        bucket_numel: elements of the bucket, padding included, a multiple of ``dp_size``.
        dp_size: ranks that own an equal part of it each.

    Returns:
        [dp_size] int64.
    """
    return np.diff(_used_before(slots, _edges(bucket_numel, dp_size)))


def count_block_rows(
    format: BlockScaledFormat, slots: Sequence[Slot], bucket_numel: int, dp_size: int
) -> BlockRowCounts:
    """Count whole and cut block rows of each rank; arguments as of :func:`count_owned`.

    Args:
        format: whose block rows.
        slots: parameters of the bucket, at least one.
        bucket_numel: elements of the bucket, padding included, a multiple of ``dp_size``.
        dp_size: ranks that own an equal part of it each.
    """
    edges = _edges(bucket_numel, dp_size)
    begun, ended = _block_rows_before(format, slots, edges)
    # Block rows follow each other: those that end in a shard and begin in it are whole.
    whole = np.maximum(ended[1:] - begun[:-1], 0)
    is_inside = begun > ended
    return BlockRowCounts(whole=whole, has_cut=is_inside[:-1] | is_inside[1:])


def _edges(bucket_numel: int, dp_size: int) -> Counts:
    return np.arange(dp_size + 1, dtype=np.int64) * (bucket_numel // dp_size)


def _used_before(slots: Sequence[Slot], edges: Counts) -> Counts:
    """Return the elements of parameters before each edge."""
    place = _place(slots, edges)
    return place.before([slot.numel for slot in place.slots]) + place.offset


def _block_rows_before(
    format: BlockScaledFormat, slots: Sequence[Slot], edges: Counts
) -> tuple[Counts, Counts]:
    """Return how many block rows begin before each edge, and how many end there or before."""
    place = _place(slots, edges)
    block_rows = [-(-slot.shape[1] // format.block_row_height) for slot in place.slots]
    before = place.before(
        [slot.shape[0] * count for slot, count in zip(place.slots, block_rows, strict=True)]
    )
    cols = place.of_each([slot.shape[2] for slot in place.slots])
    rows = place.of_each([slot.shape[1] for slot in place.slots])
    expert: Counts = (place.offset // (rows * cols)).astype(np.int64)
    inside = place.offset - expert * rows * cols
    before = before + expert * place.of_each(block_rows)
    ended: Counts = (inside // (cols * format.block_row_height)).astype(np.int64)
    rest = inside - ended * cols * format.block_row_height
    return before + ended + (rest > 0), before + ended


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Place:
    """Where edges lie among parameters."""

    slots: Sequence[Slot]
    """In the order of the bucket."""
    index: Counts
    """The last parameter that begins at each edge or before."""
    offset: Counts
    """Elements from there to the edge, at most those of the parameter."""

    def of_each(self, values: Sequence[int]) -> Counts:
        """Return the value of each edge's parameter."""
        return np.asarray(_integers(values)[self.index])

    def before(self, sizes: Sequence[int]) -> Counts:
        """Return the sum of the sizes of all parameters before each edge's."""
        total = _integers(sizes)
        return np.asarray((total.cumsum() - total)[self.index])


def _place(slots: Sequence[Slot], edges: Counts) -> _Place:
    ordered = sorted(slots, key=lambda slot: slot.start)
    starts = _integers([slot.start for slot in ordered])
    numels = _integers([slot.numel for slot in ordered])
    index = np.maximum(np.searchsorted(starts, edges, side="right") - 1, 0)
    offset = np.clip(edges - starts[index], 0, numels[index])
    return _Place(slots=ordered, index=index, offset=offset)


def _integers(values: Sequence[int]) -> Counts:
    return np.array(values, dtype=np.int64)
