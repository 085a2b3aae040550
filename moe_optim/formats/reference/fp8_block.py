"""FP8 blocks: E4M3 data, one fp32 scale per 128x128 elements, columnwise transposed."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_optim.formats import BlockScaledFormat, QuantizedWeight
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
        amax = as_magnitude(amax_of_runs(amax_of_columns(bits), BLOCK))
        scale = encode_scale(amax, out.format)
        rowwise_scale[part] = scale.reciprocal()
        if out.format.scale_encoding == "power_of_two":
            scale = scale.bfloat16()  # exact products, except where E4M3 rounds to zero
        encode_e4m3_(data[part], weight * spread(scale, BLOCK), saturate=not finite)


def encode_scale(amax: Tensor, format: BlockScaledFormat) -> Tensor:
    """Return the fp32 factor that encodes the weights of a block; its inverse is stored.

    It is 448 / amax rounded to nearest, at most the largest bf16, or the largest power of two up to
    that if ``format`` stores powers of two; 1 for an amax of zero, Inf or NaN. As in Transformer
    Engine's ``compute_scale_from_types`` of bf16 weights.
    """
    scale = encode_tensor_scale(amax).clamp(max=torch.finfo(torch.bfloat16).max)
    if format.scale_encoding == "fp32":
        return scale
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def _quantize_padded_into(master: Tensor, out: QuantizedWeight) -> None:
    """Quantize with zero padding, which changes no amax, and crop the result."""
    _, rows, cols = master.shape
    padded_master = pad(master, (0, -cols % BLOCK, 0, -rows % BLOCK))
    padded = QuantizedWeight.empty(out.format, padded_master.shape, device=master.device)
    quantize_into(padded_master, padded)
    out.rowwise_data.copy_(padded.rowwise_data[:, :rows, :cols])
    out.rowwise_scale.copy_(padded.rowwise_scale)
