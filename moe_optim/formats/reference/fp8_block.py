"""FP8 blocks: E4M3 data, one fp32 power of two per 128x128 elements, columnwise transposed."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_optim.formats import FP8_BLOCK, QuantizedWeight
from moe_optim.formats.reference.blocks import (
    amax_of_columns,
    amax_of_runs,
    as_magnitude,
    chunks,
    magnitude_bits,
    spread,
)
from moe_optim.formats.reference.codes import encode_e4m3_
from moe_optim.formats.reference.tensorwise import encode_scale as encode_tensor_scale

BLOCK = 128


def quantize_into(master: Tensor, out: QuantizedWeight) -> None:
    """Write the rowwise FP8 block buffers of ``master`` [E, R, C] into contiguous ``out``.

    Blocks at the lower and right edges may be partial.
    """
    _, rows, cols = master.shape
    if rows % BLOCK or cols % BLOCK:
        _quantize_padded_into(master, out)
        return
    data = out.rowwise_data.view(-1, BLOCK, cols)
    rowwise_scale = out.rowwise_scale.view(-1, cols // BLOCK)
    for part, weight in chunks(master, BLOCK):  # [n, 128, C]
        bits, finite = magnitude_bits(weight)
        scale = encode_scale(as_magnitude(amax_of_runs(amax_of_columns(bits), BLOCK)))
        rowwise_scale[part] = scale.reciprocal()
        # The product is exact in bf16, except where E4M3 rounds to zero.
        scaled = weight.mul_(spread(scale.bfloat16(), BLOCK))
        encode_e4m3_(data[part], scaled, saturate=not finite)


def encode_scale(amax: Tensor) -> Tensor:
    """Return the power of two, fp32, that encodes the weights of a block; its inverse is stored.

    It is the largest one up to 448 / amax, at most 2^127; 1 for an amax of zero, Inf or NaN.
    """
    power = encode_tensor_scale(amax).view(torch.int32) & 0x7F800000
    return power.view(torch.float32)


def _quantize_padded_into(master: Tensor, out: QuantizedWeight) -> None:
    """Quantize with zero padding, which changes no amax, and crop the result."""
    _, rows, cols = master.shape
    padded_master = pad(master, (0, -cols % BLOCK, 0, -rows % BLOCK))
    padded = QuantizedWeight.empty(FP8_BLOCK, padded_master.shape, device=master.device)
    quantize_into(padded_master, padded)
    out.rowwise_data.copy_(padded.rowwise_data[:, :rows, :cols])
    out.rowwise_scale.copy_(padded.rowwise_scale)
