"""MXFP8: E4M3 data, one E8M0 scale per 32 elements of a row and of a column, or per 32x32."""

from torch import Tensor

from moe_optim.formats import MXFP8, QuantizedWeight
from moe_optim.formats.reference.blocks import (
    amax_of_columns,
    amax_of_runs,
    as_magnitude,
    chunks,
    magnitude_bits,
    spread,
)
from moe_optim.formats.reference.codes import e8m0_reciprocal, e8m0_round_up, encode_e4m3_

BLOCK = 32


def quantize_into(master: Tensor, out: QuantizedWeight) -> None:
    """Write the MXFP8 buffers of ``master`` [E, R, C] into contiguous ``out``."""
    cols = master.shape[-1]
    rowwise_data = out.rowwise_data.view(-1, BLOCK, cols // BLOCK, BLOCK)
    columnwise_data = out.columnwise_data.view(-1, BLOCK, cols)
    rowwise_scale = out.rowwise_scale.view(-1, BLOCK, cols // BLOCK)
    columnwise_scale = out.columnwise_scale.view(-1, cols)
    for part, weight in chunks(master, BLOCK):  # [n, 32, C]
        bits, finite = magnitude_bits(weight)
        scale = scale_code(amax_of_columns(bits))  # [n, C]
        columnwise_scale[part] = scale
        scaled = weight * e8m0_reciprocal(scale).unsqueeze(-2)
        encode_e4m3_(columnwise_data[part], scaled, saturate=not finite)

        scale = scale_code(amax_of_runs(bits, BLOCK))  # [n, 32, C/32]
        rowwise_scale[part] = scale
        scaled = weight.view(*scale.shape, BLOCK) * e8m0_reciprocal(scale).unsqueeze(-1)
        encode_e4m3_(rowwise_data[part], scaled, saturate=not finite)


def quantize_2d_into(master: Tensor, out: QuantizedWeight) -> None:
    """Write the rowwise MXFP8 2-D buffers of ``master`` [E, R, C] into contiguous ``out``."""
    cols = master.shape[-1]
    data = out.rowwise_data.view(-1, BLOCK, cols)
    rowwise_scale = out.rowwise_scale.view(-1, cols // BLOCK)
    for part, weight in chunks(master, BLOCK):  # [n, 32, C]
        bits, finite = magnitude_bits(weight)
        scale = scale_code(amax_of_runs(amax_of_columns(bits), BLOCK))  # [n, C/32]
        rowwise_scale[part] = scale
        scaled = weight.mul_(spread(e8m0_reciprocal(scale), BLOCK))
        encode_e4m3_(data[part], scaled, saturate=not finite)


def scale_code(amax_bits: Tensor) -> Tensor:
    """Return the E8M0 code of the smallest scale that brings a bf16 amax to 448 or less.

    A finite bf16 amax divided by that scale never exceeds 448, so finite data needs no clamp. The
    product with the scale's reciprocal is exact in bf16, except where E4M3 rounds to zero.
    """
    return e8m0_round_up(as_magnitude(amax_bits) * (1.0 / MXFP8.data_max))
