"""Where parameters lie in a bucket, and their bytes in what is gathered: from sizes alone.

Parameters stay where Megatron puts them, counted from the start of their bucket, at every
data-parallel size. Only the padding at the end of a bucket grows, so that shards end where block
rows, scales or at least bytes end.
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
"""Megatron begins parameters at multiples of so many elements."""
MOST_GROWTH = Fraction(1, 100)
"""Largest growth of a bucket for shards of whole block rows, or of whole scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter in a bucket."""

    name: str
    start: int
    """First element within the bucket."""
    shape: tuple[int, int, int]
    """Logical [E, R, C]."""

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element within the bucket."""
        return self.start + self.numel

    def owned(self, rank: int, shard_numel: int) -> range:
        """Return the elements in the shard of ``rank``, counted in the parameter."""
        first = max(self.start, rank * shard_numel) - self.start
        end = min(self.end, (rank + 1) * shard_numel) - self.start
        return range(first, max(first, end))

    def cuts(self, shard_numel: int) -> tuple[int, ...]:
        """Return where two shards of a bucket meet inside the parameter, counted in it."""
        first = (self.start // shard_numel + 1) * shard_numel
        return tuple(cut - self.start for cut in range(first, self.end, shard_numel))


def side_by_side(shapes: Iterable[tuple[int, int, int]], name: str = "weight") -> tuple[Slot, ...]:
    """Return a slot for each shape, laid out as Megatron lays out the parameters of a bucket.

    Args:
        shapes: [E, R, C] each.
        name: name of all of them, before their number.
    """
    slots: list[Slot] = []
    for index, shape in enumerate(shapes):
        start = round_up(slots[-1].end, START) if slots else 0
        slots.append(Slot(name=f"{name}{index}", start=start, shape=shape))
    return tuple(slots)


# The end of a managed bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketEnd:
    """The length of a bucket, and what its shards are whole numbers of."""

    numel: int
    unit: Literal["block_row", "scale", "byte"]
    """``block_row``: no block lies on two ranks, so no maxima are exchanged. ``scale``: some do,
    but each rank's slice of every buffer is whole. ``byte``: only data has whole bytes."""


def aligned_end(
    format: BlockScaledFormat, slots: Sequence[Slot], *, dp_size: int, divisor: int = 1
) -> BucketEnd:
    """Return the shortest end of a bucket whose shards are cut as rarely as is cheap.

    Args:
        format: format of all parameters.
        slots: parameters of the bucket; at least one.
        dp_size: number of ranks that own an equal part of the bucket each.
        divisor: number of elements that the length must be a multiple of for other reasons.
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
    """Return whether some block row lies in two shards of ``shard_numel`` elements each."""
    return any(
        cut % (slot.shape[1] * slot.shape[2]) % (format.block_row_height * slot.shape[2])
        for slot in slots
        for cut in slot.cuts(shard_numel)
    )


# What a gather carries


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """One data or scale buffer of all parameters of a bucket, in one piece of memory.

    A *sliced* buffer has as many bytes for every element of the bucket, so that the slice of a rank
    is that of its elements, and an all-gather in place completes it. A scale lies in the slice of
    the rank that owns its share of the elements of its block row; all owners of a block row know
    all of its scales, so each slice is right. All others are zero where a rank knows nothing, and
    completed by an all-reduce with MAX: exact, since all that is written is equal and positive.
    """

    name: str
    """Field of ``QuantizedWeight``."""
    itemsize: int
    """Bytes of an entry: 1 of a code, 4 of an fp32."""
    numel: int
    """Entries, padding included."""
    starts: tuple[int, ...]
    """First entry of each parameter."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape that the entries of each parameter have."""
    is_sliced: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * self.itemsize


def plan_buffers(
    format: BlockScaledFormat, slots: Sequence[Slot], bucket_numel: int, dp_size: int
) -> tuple[BufferPlan, ...]:
    """Return every buffer that must travel for a bucket.

    Args:
        format: format of all parameters in it.
        slots: parameters, in any order; gaps between them are padding.
        bucket_numel: elements of the bucket, padding included.
        dp_size: number of ranks that own an equal part of it each.

    Raises:
        LayoutError: the bucket does not divide, or two ranks would share a byte of data.
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
    """Return a buffer whose entries follow the elements, or None where they do not."""
    per_element = bytes_per_element / itemsize
    starts = [slot.start * per_element for slot in slots]
    are_whole = all(at.denominator == 1 for at in (*starts, bucket_numel // dp_size * per_element))
    if not are_whole or [slot.numel * per_element for slot in slots] != list(map(prod, shapes)):
        return None
    return BufferPlan(
        name=name,
        itemsize=itemsize,
        numel=int(bucket_numel * per_element),
        starts=tuple(map(int, starts)),
        shapes=tuple(shapes),
        is_sliced=True,
    )


def _reduced(name: str, itemsize: int, shapes: Sequence[tuple[int, ...]]) -> BufferPlan:
    """Return a buffer with one parameter after the other."""
    *starts, numel = accumulate(map(prod, shapes), initial=0)
    return BufferPlan(
        name=name,
        itemsize=itemsize,
        numel=numel,
        starts=tuple(starts),
        shapes=tuple(shapes),
        is_sliced=False,
    )
