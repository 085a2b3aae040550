"""Per-tensor FP8: one scale per weight from its present amax (current scaling)."""

import torch
from torch import Tensor

from moe_optim.formats.reference.codes import encode_e4m3_

E4M3_MAX = 448.0
_CHUNK = 1 << 16  # elements; their fp32 copies fit a cache


def encode_scale(amax: Tensor) -> Tensor:
    """Return the factor of the elements of a weight; its inverse is stored.

    Args:
        amax: fp32 of any shape, not negative.

    Returns:
        fp32 of the same shape: 448 / amax rounded to nearest, FLT_MAX if that overflows; 1 for an
        amax of zero, Inf or NaN.
    """
    # Not `448 / amax`, which torch computes as a product with a rounded reciprocal.
    quotient = torch.div(torch.full_like(amax, E4M3_MAX), amax)
    quotient = quotient.clamp(max=torch.finfo(torch.float32).max)
    return quotient.masked_fill((amax == 0) | ~amax.isfinite(), 1.0)


@torch.no_grad()
def cast_into(out: Tensor, source: Tensor, scale: Tensor) -> None:
    """Write the E4M3 codes of a flat range of a weight.

    Args:
        out: [n] uint8; overwritten.
        source: [n] fp32, rounded to bf16 first, as in every cast here.
        scale: [] or [1] fp32, factor of the whole weight.
    """
    for codes, values in zip(torch.split(out, _CHUNK), torch.split(source, _CHUNK), strict=True):
        encode_e4m3_(codes, values.bfloat16().float() * scale)
