"""How the buffers of a bucket travel: in slices that ranks gather, or by a maximum over ranks.

A *sliced* buffer has as many bytes for every element of the bucket, so that the slice of a rank is
that of its elements, and an all-gather in place completes it. A scale lies in the slice of the rank
that owns its share of the elements of its block row; all owners of a block row know all of its
scales, so each slice is right. A *reduced* buffer does not divide like that: it holds zeros where a
rank knows nothing, and a MAX all-reduce completes it, exactly, because all values written are equal
and positive.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat

if TYPE_CHECKING:
    import torch

GLOBAL_AMAX = "global_amax"
Shapes = tuple[tuple[int, ...], ...]


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
        """Return the elements that lie in the shard of ``rank``, counted in the parameter."""
        first = max(self.start, rank * shard_numel) - self.start
        end = min(self.end, (rank + 1) * shard_numel) - self.start
        return range(first, max(first, end))

    def cuts(self, shard_numel: int) -> tuple[int, ...]:
        """Return where shards of a bucket meet inside of the parameter, counted in it."""
        first = (self.start // shard_numel + 1) * shard_numel
        return tuple(cut - self.start for cut in range(first, self.end, shard_numel))


def side_by_side(shapes: Iterable[tuple[int, int, int]], name: str = "weight") -> tuple[Slot, ...]:
    """Return a slot for each shape, laid as Megatron lays parameters in a bucket.

    Args:
        shapes: [E, R, C] each. Every one starts at the next multiple of 64 elements.
        name: of all of them, before their number.
    """
    slots: list[Slot] = []
    for index, shape in enumerate(shapes):
        start = -(-slots[-1].end // 64) * 64 if slots else 0
        slots.append(Slot(name=f"{name}{index}", start=start, shape=shape))
    return tuple(slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """One buffer of all parameters of a bucket, side by side in one piece of memory."""

    name: str
    """Field of ``QuantizedWeight``."""
    itemsize: int
    """Bytes of an entry: 1 of a code, 4 of an fp32."""
    numel: int
    """Entries, padding included."""
    starts: tuple[int, ...]
    """First entry of each parameter."""
    shapes: Shapes
    """Shape of the buffer of each parameter."""
    bytes_per_element: Fraction | None
    """Bytes for each element of the bucket; None for a reduced buffer."""

    @property
    def is_sliced(self) -> bool:
        """Whether ranks gather slices; else they reduce the whole buffer with MAX."""
        return self.bytes_per_element is not None

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype of an entry: uint8, or fp32."""
        import torch

        return {1: torch.uint8, 4: torch.float32}[self.itemsize]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * self.itemsize


def plan_buffers(
    format: BlockScaledFormat, slots: Sequence[Slot], bucket_numel: int, dp_size: int
) -> tuple[BufferPlan, ...]:
    """Return every buffer that must travel for a bucket.

    Args:
        format: of all parameters in it.
        slots: parameters, in any order; gaps between them are padding.
        bucket_numel: elements of the bucket, padding included.
        dp_size: ranks that own an equal part of it each.

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
        shapes: Shapes = tuple(format.data_shape(slot.shape, direction) for slot in slots)
        ratio = format.data_bytes_per_element
        data = _sliced(f"{direction}_data", 1, slots, shapes, ratio, bucket_numel)
        if data is None or (bucket_numel // dp_size * ratio) % 1:
            raise LayoutError(
                f"wire: {format.name}: expected shards of whole bytes, got {bucket_numel} elements "
                f"for {dp_size} ranks at {ratio} bytes each. Set layout: aligned."
            )
        buffers.append(data)
        shapes = tuple(format.scale_shape(slot.shape, direction) for slot in slots)
        name, itemsize = f"{direction}_scale", format.scale_itemsize
        ratio = format.scale_bytes_per_element
        scale = _sliced(name, itemsize, slots, shapes, ratio, bucket_numel)
        if scale is None or (bucket_numel // dp_size * ratio) % itemsize:
            scale = _reduced(name, itemsize, shapes)
        buffers.append(scale)
    if format.has_global_amax:
        shapes = tuple(slot.shape[:1] for slot in slots)
        buffers.append(_reduced(GLOBAL_AMAX, 4, shapes))
    return tuple(buffers)


def _sliced(
    name: str,
    itemsize: int,
    slots: Sequence[Slot],
    shapes: Shapes,
    ratio: Fraction,
    bucket_numel: int,
) -> BufferPlan | None:
    """Return a buffer whose entries follow the elements, or None where they do not."""
    per_element = ratio / itemsize
    starts = [slot.start * per_element for slot in slots]
    sizes = [slot.numel * per_element for slot in slots]
    whole = all(number.denominator == 1 for number in (*starts, bucket_numel * per_element))
    if not whole or sizes != [prod(shape) for shape in shapes]:
        return None
    return BufferPlan(
        name=name,
        itemsize=itemsize,
        numel=int(bucket_numel * per_element),
        starts=tuple(int(start) for start in starts),
        shapes=shapes,
        bytes_per_element=ratio,
    )


def _reduced(name: str, itemsize: int, shapes: Shapes) -> BufferPlan:
    """Return a buffer with one parameter after the other."""
    starts, total = [], 0
    for shape in shapes:
        starts.append(total)
        total += prod(shape)
    return BufferPlan(
        name=name,
        itemsize=itemsize,
        numel=total,
        starts=tuple(starts),
        shapes=shapes,
        bytes_per_element=None,
    )
