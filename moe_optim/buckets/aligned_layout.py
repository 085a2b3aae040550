"""Where a bucket ends, so that its shards end where blocks, scales or at least bytes end.

Parameters stay where Megatron puts them, counted from the start of their bucket, at every
data-parallel size: only the padding at the end of a bucket grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Literal

from moe_optim.buckets.wire import Slot
from moe_optim.formats import BlockScaledFormat, round_up

MOST_GROWTH = Fraction(1, 100)
"""How much larger a bucket may become for its shards to end at whole bands, or whole scales."""

Unit = Literal["band", "scale", "byte"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketEnd:
    """The length of a bucket, and what its shards are whole numbers of."""

    numel: int
    unit: Unit
    """``band``: no block or band lies on two ranks, so no maxima are exchanged. ``scale``: bands
    do, but each rank's slice of every plane is whole. ``byte``: only data has whole bytes."""


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
    band = lcm(*(format.band_rows * slot.shape[2] for slot in slots))
    steps: tuple[tuple[Unit, int], ...] = (
        ("band", band),
        ("scale", _elements_per_scale(format)),
        ("byte", format.elements_per_byte),
    )
    for unit, shard_multiple in steps:
        numel = round_up(used, lcm(divisor, dp_size * shard_multiple))
        affordable = unit == "byte" or numel - stock <= MOST_GROWTH * used
        if affordable and (unit != "band" or not cuts_bands(format, slots, numel // dp_size)):
            return BucketEnd(numel=numel, unit=unit)
    raise AssertionError("the last step is always taken")


def cuts_bands(format: BlockScaledFormat, slots: Sequence[Slot], shard_numel: int) -> bool:
    """Return whether some band lies in several shards.

    Args:
        format: whose bands.
        slots: parameters of a bucket.
        shard_numel: elements of each shard.
    """
    for slot in slots:
        _, rows, cols = slot.shape
        for cut in slot.cuts(shard_numel):
            if (cut % (rows * cols)) % (format.band_rows * cols):
                return True
    return False


def _elements_per_scale(format: BlockScaledFormat) -> int:
    rows, cols = format.rowwise_block
    return lcm(rows * cols, format.elements_per_byte)
