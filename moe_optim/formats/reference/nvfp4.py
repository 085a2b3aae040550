"""Scales of NVFP4: one E4M3 scale per block, relative to one fp32 amax per expert."""

import torch
from torch import Tensor

from moe_optim.formats import NVFP4
from moe_optim.formats.reference.codes import decode_e4m3

FP32_MAX = torch.finfo(torch.float32).max
FP32_TINY = torch.finfo(torch.float32).tiny
SCALE_MAX = 448.0
SMALLEST_DECODING_AMAX = SCALE_MAX * NVFP4.data_max * 2.0**-128
"""Amax below which experts are encoded with FLT_MAX, as if this were their amax."""


def global_encode_scale(global_amax: Tensor) -> Tensor:
    """Return 448 * 6 / amax of experts in fp32, at most FLT_MAX; 1 for zero and Inf."""
    amax = global_amax.clamp(min=FP32_TINY)
    # Not `2688 / amax`, which torch computes by multiplying with a rounded reciprocal.
    scale = torch.div(torch.full_like(amax, SCALE_MAX * NVFP4.data_max), amax).clamp(max=FP32_MAX)
    return scale.masked_fill((global_amax == 0) | global_amax.isinf(), 1.0)


def decoding_amax(global_amax: Tensor) -> Tensor:
    """Return the amax whose 2688th part inverts :func:`global_encode_scale`; Inf stays Inf.

    Transformer Engine decodes with the amax itself, so its GEMMs and dequantization give smaller
    values for experts below ``SMALLEST_DECODING_AMAX``.
    """
    return global_amax.clamp(min=SMALLEST_DECODING_AMAX)


def block_scale(block_amax: Tensor, global_encode: Tensor) -> Tensor:
    """Return the fp32 block scale before the cast to E4M3: amax / 6, in global units."""
    # Same association as TE, and multiplication by the rounded 1/6 instead of a division.
    return block_amax * (global_encode * (1.0 / NVFP4.data_max))


def encode_factor(scale: Tensor, global_encode: Tensor) -> Tensor:
    """Return the fp32 factor of a block's weights: 1 / decoded scale, at most FLT_MAX."""
    decoded = decode_e4m3(scale) * global_encode.reciprocal()
    return decoded.reciprocal().clamp(max=FP32_MAX)
