"""Helpers that cut flat ranges into parts and rectangles into tiles, one per program."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
