"""Layout of parameters in a bucket, and of their bytes in gathered buffers, from sizes alone.

Parameters keep Megatron's offsets within their bucket at every data-parallel size. Only the padding
at the end of a bucket grows, so that shards end at boundaries of block rows, scales or at least
bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm, prod
from typing import Literal

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat, round_up

START = 64
"""Alignment of parameters in Megatron's buckets, in elements."""
MOST_GROWTH = Fraction(1, 100)
"""Maximum growth of a bucket for shards of whole block rows or whole scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Place of one parameter in a bucket."""

    name: str
    start: int
    """First element within the bucket."""
    shape: tuple[int, int, int]
    """Logical shape [E, R, C]."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """End within the bucket, exclusive."""
        return self.start + self.numel

    def owned(self, rank: int, shard_numel: int) -> range:
        """Return the range of the parameter's elements in the shard of ``rank``."""
        first = max(self.start, rank * shard_numel) - self.start
        end = min(self.end, (rank + 1) * shard_numel) - self.start
        return range(first, max(first, end))

    def cuts(self, shard_numel: int) -> tuple[int, ...]:
        """Return the shard boundaries inside the parameter, as offsets within it."""
        first = (self.start // shard_numel + 1) * shard_numel
        return tuple(cut - self.start for cut in range(first, self.end, shard_numel))


def side_by_side(shapes: Iterable[tuple[int, int, int]], name: str = "weight") -> tuple[Slot, ...]:
    """Return one slot per shape [E, R, C], placed as Megatron places parameters in a bucket."""
    slots: list[Slot] = []
    for index, shape in enumerate(shapes):
        start = round_up(slots[-1].end, START) if slots else 0
        slots.append(Slot(name=f"{name}{index}", start=start, shape=shape))
    return tuple(slots)


# Bucket ends


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketEnd:
    """Length of a bucket, and the unit that its shards are multiples of."""

    numel: int
    unit: Literal["block_row", "scale", "byte"]
    """``block_row``: no block crosses shards, so no amaxes are exchanged. ``scale``: some do, but
    each rank's slice of every buffer is whole. ``byte``: only data has whole bytes."""


def aligned_end(
    format: BlockScaledFormat, slots: Sequence[Slot], *, dp_size: int, divisor: int = 1
) -> BucketEnd:
    """Return the shortest end of a bucket with the coarsest unit within ``MOST_GROWTH``.

    ``divisor`` must divide the length, too.
    """
    used = max(slot.end for slot in slots)
    rows, cols = format.rowwise_block
    most = round_up(used, lcm(divisor, dp_size)) + MOST_GROWTH * used

    def end(shard_multiple: int) -> int:
        return round_up(used, lcm(divisor, dp_size * shard_multiple))

    numel = end(lcm(*(format.block_row_height * slot.shape[2] for slot in slots)))
    if numel <= most and not cuts_block_rows(format, slots, numel // dp_size):
        return BucketEnd(numel=numel, unit="block_row")
    numel = end(lcm(rows * cols, format.elements_per_byte))
    if numel <= most:
        return BucketEnd(numel=numel, unit="scale")
    return BucketEnd(numel=end(format.elements_per_byte), unit="byte")


def cuts_block_rows(format: BlockScaledFormat, slots: Sequence[Slot], shard_numel: int) -> bool:
    """Return whether some block row crosses shards of ``shard_numel`` elements."""
    return any(
        cut % (slot.shape[1] * slot.shape[2]) % (format.block_row_height * slot.shape[2])
        for slot in slots
        for cut in slot.cuts(shard_numel)
    )


# Gathered buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """Layout of one data or scale buffer of all parameters of a bucket.

    A *sliced* buffer has the same number of bytes per element of the bucket, so an in-place
    all-gather of the shards' slices completes it. A scale is in the slice of the rank that owns the
    matching elements of its block row; all owners of a block row compute all of its scales. Other
    buffers are zero outside of this rank's entries and completed by an all-reduce with MAX, which
    is exact since all written values are equal and positive.
    """

    name: str
    """Field of ``QuantizedWeight``."""
    itemsize: int
    """Bytes per entry: 1 for a code, 2 for bf16, 4 for fp32."""
    numel: int
    """Number of entries, padding included."""
    starts: tuple[int, ...]
    """First entry of each parameter."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each parameter's entries."""
    is_sliced: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize


def plan_buffers(
    format: BlockScaledFormat, slots: Sequence[Slot], bucket_numel: int, dp_size: int
) -> tuple[BufferPlan, ...]:
    """Return every buffer that a gather of the bucket communicates; gaps between slots are padding.

    Raises:
        LayoutError: ``dp_size`` does not divide the bucket, or two ranks would share a byte of
            data.
    """
    if dp_size < 1 or bucket_numel % dp_size:
        raise LayoutError(
            f"wire: expected a bucket that divides among {dp_size} ranks, got {bucket_numel} "
            "elements. Pad the end of the bucket."
        )
    buffers = []
    for direction in format.gathered_directions:
        shapes = [format.data_shape(slot.shape, direction) for slot in slots]
        ratio = format.data_bytes_per_element
        data = _sliced(f"{direction}_data", 1, ratio, slots, shapes, bucket_numel, dp_size)
        if data is None:
            raise LayoutError(
                f"wire: {format.name}: expected shards of whole bytes, got {bucket_numel} elements "
                f"for {dp_size} ranks at {ratio} bytes each. Set layout: aligned."
            )
        name, itemsize = f"{direction}_scale", format.scale_itemsize
        shapes = [format.scale_shape(slot.shape, direction) for slot in slots]
        ratio = format.scale_bytes_per_element
        scale = _sliced(name, itemsize, ratio, slots, shapes, bucket_numel, dp_size)
        buffers += [data, scale or _reduced(name, itemsize, shapes)]
    if format.has_global_amax:
        buffers.append(_reduced("global_amax", 4, [slot.shape[:1] for slot in slots]))
    return tuple(buffers)


def _sliced(
    name: str,
    itemsize: int,
    bytes_per_element: Fraction,
    slots: Sequence[Slot],
    shapes: Sequence[tuple[int, ...]],
    bucket_numel: int,
    dp_size: int,
) -> BufferPlan | None:
    """Return a buffer whose entries are proportional to elements, or None if they are not."""
    entries, per_elements = (bytes_per_element / itemsize).as_integer_ratio()
    starts = [slot.start * entries for slot in slots]
    shard = bucket_numel // dp_size * entries
    are_whole = not any(at % per_elements for at in (*starts, shard))
    numels = [prod(shape) * per_elements for shape in shapes]
    if not are_whole or [slot.numel * entries for slot in slots] != numels:
        return None
    return BufferPlan(
        name=name,
        itemsize=itemsize,
        numel=bucket_numel * entries // per_elements,
        starts=tuple(at // per_elements for at in starts),
        shapes=tuple(shapes),
        is_sliced=True,
    )


def _reduced(name: str, itemsize: int, shapes: Sequence[tuple[int, ...]]) -> BufferPlan:
    *starts, numel = accumulate(map(prod, shapes), initial=0)
    return BufferPlan(
        name=name,
        itemsize=itemsize,
        numel=numel,
        starts=tuple(starts),
        shapes=tuple(shapes),
        is_sliced=False,
    )
