"""Per-tensor FP8 (current scaling): one scale per weight, from its current amax."""

import torch
from torch import Tensor

from moe_optim.formats.reference.codes import encode_e4m3

E4M3_MAX = 448.0
_CHUNK = 1 << 16  # elements; their fp32 copies fit a cache


def encode_scale(amax: Tensor) -> Tensor:
    """Return the fp32 factor that encodes the elements of a weight; its inverse is stored.

    It is 448 / amax rounded to nearest, FLT_MAX on overflow; 1 for an amax of zero, Inf or NaN.
    """
    # Not `448 / amax`, which torch computes by multiplying with a rounded reciprocal.
    quotient = torch.div(torch.full_like(amax, E4M3_MAX), amax)
    quotient = quotient.clamp(max=torch.finfo(torch.float32).max)
    return quotient.masked_fill((amax == 0) | ~amax.isfinite(), 1.0)


@torch.no_grad()
def cast_into(out: Tensor, source: Tensor, scale: Tensor) -> None:
    """Write the E4M3 codes of a flat fp32 range of a weight, rounded to bf16 first."""
    for codes, values in zip(torch.split(out, _CHUNK), torch.split(source, _CHUNK), strict=True):
        codes.copy_(encode_e4m3(values.bfloat16().float() * scale))
