"""Fused multiply-add in plain torch, as GPUs and vectorised CPU kernels contract it."""

import torch
from torch import Tensor


def fma(factor: Tensor, values: Tensor, addend: Tensor) -> Tensor:
    """Return ``factor * values + addend`` of fp32 tensors, rounded once, subnormals kept.

    The product of two fp32 numbers is exact in fp64. The sum is rounded to odd, to avoid double
    rounding.
    """
    product, addend = factor.double() * values.double(), addend.double()
    total = product + addend
    added = total - product
    lost = (product - (total - added)) + (addend - added)
    even = total.view(torch.int64) % 2 == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(lost, torch.inf), lost))
    return torch.where(even & (lost.abs() > 0), odd, total).float()
