"""Fused multiply-add, sums of squares, and counts of zeros."""

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements; their fp64 copies fit a cache


def fma(factor: Tensor, values: Tensor, addend: Tensor) -> Tensor:
    """Return ``factor * values + addend`` of fp32 tensors, rounded once, subnormals kept.

    GPUs and vectorised CPU kernels contract both operations so. The product of two fp32 numbers is
    exact in fp64. The sum is rounded to odd, to avoid double rounding.
    """
    product, addend = factor.double() * values.double(), addend.double()
    total = product + addend
    added = total - product
    lost = (product - (total - added)) + (addend - added)
    even = total.view(torch.int64) % 2 == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(lost, torch.inf), lost))
    return torch.where(even & (lost.abs() > 0), odd, total).float()


@torch.no_grad()
def sum_squares(values: Tensor) -> Tensor:
    """Return the fp64 sum of squares of a flat fp32 or bf16 tensor; each square is exact."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in torch.split(values, _CHUNK):
        total += chunk.double().square_().sum()
    return total


@torch.no_grad()
def count_zeros(values: Tensor) -> Tensor:
    """Return the number of elements equal to 0.0 or -0.0, [] int64."""
    return values.numel() - torch.count_nonzero(values)
