"""The sum of squares of gradients, and how many of them are zero."""

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements; their fp64 copies fit a cache


@torch.no_grad()
def sum_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat fp32 or bf16 tensor, [] fp64; 0 if it is empty.

    Squares are exact in fp64; only sums round.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in torch.split(values, _CHUNK):
        total += chunk.double().square_().sum()
    return total


@torch.no_grad()
def count_zeros(values: Tensor) -> Tensor:
    """Return how many elements of a tensor are 0.0 or -0.0, [] int64."""
    return values.numel() - torch.count_nonzero(values)
