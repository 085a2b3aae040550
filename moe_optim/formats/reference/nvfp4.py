"""NVFP4: packed E2M1 data, one E4M3 scale per 16x16 elements, and one fp32 amax per expert."""

import torch
from torch import Tensor

from moe_optim.formats import NVFP4, QuantizedWeight
from moe_optim.formats.reference.blocks import (
    amax_of_columns,
    amax_of_runs,
    as_magnitude,
    chunks,
    magnitude_bits,
    spread,
)
from moe_optim.formats.reference.codes import decode_e4m3, encode_e2m1, encode_e4m3, pack_nibbles

BLOCK = 16
FP32_MAX = torch.finfo(torch.float32).max
FP32_TINY = torch.finfo(torch.float32).tiny
SCALE_MAX = 448.0
SMALLEST_DECODING_AMAX = SCALE_MAX * NVFP4.data_max * 2.0**-128
"""Amax below which experts are encoded with FLT_MAX, as if this were their amax."""


def quantize_into(master: Tensor, out: QuantizedWeight) -> None:
    """Write the rowwise NVFP4 buffers of ``master`` [E, R, C] into contiguous ``out``."""
    experts, rows, cols = master.shape
    assert out.global_amax is not None, "QuantizedWeight guarantees an amax for NVFP4"
    amax = torch.empty(
        (experts * rows // BLOCK, cols // BLOCK), dtype=torch.float32, device=master.device
    )
    all_finite = True
    for part, weight in chunks(master, BLOCK):  # [n, 16, C]
        bits, finite = magnitude_bits(weight)
        all_finite &= finite
        amax[part] = as_magnitude(amax_of_runs(amax_of_columns(bits), BLOCK))
    block_amax = amax.view(experts, rows // BLOCK, cols // BLOCK)
    out.global_amax.copy_(block_amax.amax((1, 2)))
    global_encode = global_encode_scale(out.global_amax).view(-1, 1, 1)
    scale = encode_e4m3(block_scale(block_amax, global_encode))
    out.rowwise_scale.copy_(scale)

    factor = encode_factor(scale, global_encode).view(-1, cols // BLOCK)
    rowwise_data = out.rowwise_data.view(-1, BLOCK, cols // 2)
    for part, weight in chunks(master, BLOCK):
        scaled = weight * spread(factor[part], BLOCK)  # [n, 16, C]
        rowwise_data[part] = pack_nibbles(encode_e2m1(scaled, has_nan=not all_finite))


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
