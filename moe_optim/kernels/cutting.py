"""Cutting flat ranges into parts, and rectangles into tiles, as programs of a launch take them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cut_ranges(numels: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut ranges into parts of at most ``length`` elements.

    Args:
        numels: elements of each range, [n] int64 on the CPU.
        length: elements of a part, one for all ranges or one each.

    Returns:
        For each part the number of its range and its number within, [parts] int64; and the bounds
        of the ranges among the parts, [n + 1] int64.
    """
    counts = (numels + length - 1) // length
    bounds = torch.cat([int64([0]), counts.cumsum(0)])
    ranges = torch.arange(len(numels), device="cpu").repeat_interleave(counts)
    numbers = torch.arange(len(ranges), device="cpu") - bounds[ranges]
    return ranges, numbers, bounds


def grid(*axes: range) -> Tensor:
    """Return all combinations of one number from each range, the last one fastest, [n, axes]."""
    if not all(axes):
        return torch.empty((0, len(axes)), dtype=torch.int64, device="cpu")
    numbers = [torch.arange(axis.start, axis.stop, axis.step, device="cpu") for axis in axes]
    return torch.cartesian_prod(*numbers).view(-1, len(axes))


def int64(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Return integers as a tensor on the CPU."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")
