"""MXFP8 with 32x32 blocks: one E8M0 scale serves rows and columns, so both share their bytes."""

from torch import Tensor

from moe_optim.formats import QuantizedWeight
from moe_optim.formats.reference.blocks import (
    amax_of_columns,
    amax_of_runs,
    magnitude_bits,
    slabs,
    spread,
)
from moe_optim.formats.reference.codes.e4m3 import encode_e4m3_
from moe_optim.formats.reference.codes.e8m0 import e8m0_reciprocal
from moe_optim.formats.reference.mxfp8 import scale_code

BLOCK = 32


def quantize_into(master: Tensor, out: QuantizedWeight) -> None:
    """Write the rowwise MXFP8 2-D buffers of ``master``; every kernel must match these bytes.

    Args:
        master: [E, R, C] fp32 or bf16, R and C multiples of 32.
        out: contiguous buffers of the same shape; all rowwise bytes are overwritten.
    """
    cols = master.shape[-1]
    data = out.rowwise_data.view(-1, BLOCK, cols)
    rowwise_scale = out.rowwise_scale.view(-1, cols // BLOCK)
    for part, weight in slabs(master, BLOCK):  # [n, 32, C]
        bits, finite = magnitude_bits(weight)
        scale = scale_code(amax_of_runs(amax_of_columns(bits), BLOCK))  # [n, C/32]
        rowwise_scale[part] = scale
        scaled = weight.mul_(spread(e8m0_reciprocal(scale), BLOCK))
        encode_e4m3_(data[part], scaled, saturate=not finite)
