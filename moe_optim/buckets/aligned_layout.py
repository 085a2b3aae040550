"""Where a bucket ends, so that its shards end where blocks, scales or at least bytes end.

Parameters stay where Megatron puts them, counted from the start of their bucket, at every
data-parallel size: only the padding at the end of a bucket grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Literal

from moe_optim.buckets.buffer_plan import Slot
from moe_optim.formats import BlockScaledFormat, round_up

MOST_GROWTH = Fraction(1, 100)
"""Largest growth of a bucket whose shards end at whole block rows or whole scales."""

Unit = Literal["block_row", "scale", "byte"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketEnd:
    """The length of a bucket, and what its shards are whole numbers of."""

    numel: int
    unit: Unit
    """``block_row``: no block or block row lies on two ranks, so no maxima are exchanged.
    ``scale``: block rows do, but each rank's slice of every buffer is whole. ``byte``: only data
    has whole bytes."""


def aligned_end(
    format: BlockScaledFormat,
    slots: Sequence[Slot],
    *,
    dp_size: int,
    divisor: int = 1,
) -> BucketEnd:
    """Return the shortest end of a bucket whose shards are cut as rarely as is cheap.

    Args:
        format: of all parameters.
        slots: parameters of the bucket; at least one.
        dp_size: ranks that own an equal part of it each.
        divisor: the bucket must have a multiple of so many elements for other reasons.
    """
    used = max(slot.end for slot in slots)
    stock = round_up(used, lcm(divisor, dp_size))
    block_row = lcm(*(format.block_row_height * slot.shape[2] for slot in slots))
    steps: tuple[tuple[Unit, int], ...] = (
        ("block_row", block_row),
        ("scale", _elements_per_scale(format)),
        ("byte", format.elements_per_byte),
    )
    for unit, shard_multiple in steps:
        numel = round_up(used, lcm(divisor, dp_size * shard_multiple))
        affordable = unit == "byte" or numel - stock <= MOST_GROWTH * used
        is_whole = unit != "block_row" or not cuts_block_rows(format, slots, numel // dp_size)
        if affordable and is_whole:
            return BucketEnd(numel=numel, unit=unit)
    raise AssertionError("the last step is always taken")


def cuts_block_rows(format: BlockScaledFormat, slots: Sequence[Slot], shard_numel: int) -> bool:
    """Return whether some block row lies in several shards.

    Args:
        format: whose block rows.
        slots: parameters of a bucket.
        shard_numel: elements of each shard.
    """
    for slot in slots:
        _, rows, cols = slot.shape
        for cut in slot.cuts(shard_numel):
            if (cut % (rows * cols)) % (format.block_row_height * cols):
                return True
    return False


def _elements_per_scale(format: BlockScaledFormat) -> int:
    rows, cols = format.rowwise_block
    return lcm(rows * cols, format.elements_per_byte)
