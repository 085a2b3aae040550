"""Sum of squares and number of zeros of gradients."""

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements; their fp64 copies fit a cache


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
