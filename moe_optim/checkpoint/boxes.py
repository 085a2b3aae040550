"""Cuts ranges of parameters into boxes; imports neither torch nor Megatron."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from operator import add, sub
from typing import Any

type Shape = tuple[int, ...]


def cut_into_boxes(
    start: int, end: int, shape: Shape, *, by_matrix: bool = False
) -> Iterator[tuple[Shape, Shape]]:
    """Yield start and size of boxes of ``shape``: its elements [start, end) in flat order.

    None is empty. There are at most ``2 * len(shape) - 1``, unless ``by_matrix`` also cuts between
    matrices, the last two axes.
    """
    if start == end:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    rows, inner = shape[1:], prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(end, inner)

    def cut_row(row: int, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
        for first, size in cut_into_boxes(start, end, rows, by_matrix=by_matrix):
            yield (row, *first), (1, *size)

    if first == last:
        yield from cut_row(first, head, tail)
        return
    if head:
        yield from cut_row(first, head, inner)
        first += 1
    if by_matrix and len(shape) > 2:
        for row in range(first, last):
            yield from cut_row(row, 0, inner)
    elif first < last:
        yield (first, *(0 for _ in rows)), (last - first, *rows)
    yield from cut_row(last, 0, tail)


def with_axes(values: Shape, axes: int, fill: int) -> Shape:
    """Return ``values`` with leading axes added, of value ``fill``, or dropped, up to ``axes``."""
    more = axes - len(values)
    return (fill,) * more + values[max(0, -more) :]


@dataclass(frozen=True, slots=True)
class OwnedBox:
    """A box of a parameter that lies within one stored tensor."""

    part: Any
    """The stored tensor, a ``ShardedTensor`` without values."""
    start: Shape
    """First element within the parameter."""
    size: Shape
    offset: Shape
    """First element within the global tensor, whose last axes are the parameter's."""


def owned_boxes(parts: list[OwnedBox], ranges: Iterable[tuple[Shape, Shape]]) -> Iterator[OwnedBox]:
    """Yield boxes of a parameter, cut at the borders of its ``parts``, see :func:`stored_parts`."""
    for first, size in ranges:
        for part in parts:
            low = tuple(map(max, first, part.start))
            high = map(min, map(add, first, size), map(add, part.start, part.size))
            extent = tuple(map(sub, high, low))
            if all(length > 0 for length in extent):
                moved = with_axes(tuple(map(sub, low, part.start)), len(part.offset), 0)
                yield OwnedBox(part.part, low, extent, tuple(map(add, part.offset, moved)))
