"""Helpers that cut ranges into parts, rectangles into tiles, and memory into tensors."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from moe_optim.formats import round_up


def cut_ranges(numels: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut ranges of ``numels`` elements, [n] int64, into parts of at most ``length`` elements.

    Returns:
        Range and index within the range of each part, [parts] int64; and the bounds of the ranges
        among the parts, [n + 1] int64.
    """
    counts = (numels + length - 1) // length
    bounds = torch.cat([int64([0]), counts.cumsum(0)])
    ranges = torch.arange(len(numels), device="cpu").repeat_interleave(counts)
    numbers = torch.arange(len(ranges), device="cpu") - bounds[ranges]
    return ranges, numbers, bounds


def grid(*axes: range) -> Tensor:
    """Return the Cartesian product of ranges, the last one fastest, [n, axes] int64."""
    if not all(axes):
        return torch.empty((0, len(axes)), dtype=torch.int64, device="cpu")
    numbers = [torch.arange(axis.start, axis.stop, axis.step, device="cpu") for axis in axes]
    return torch.cartesian_prod(*numbers).view(-1, len(axes))


def int64(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Return integers as an int64 tensor on the CPU."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


class Carver:
    """Allocator of contiguous tensors in flat uint8 memory, at multiples of ``alignment`` bytes."""

    def __init__(self, memory: Tensor, alignment: int) -> None:
        self._memory, self._alignment = memory, alignment
        self._end = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, with undefined values."""
        start, nbytes = self._end, prod(shape) * dtype.itemsize
        self._end = round_up(start + nbytes, self._alignment)
        return self._memory[start : start + nbytes].view(dtype).view(tuple(shape))
