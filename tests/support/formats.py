"""Formats that expensive tests take: one of each path through the code."""

from moe_optim.formats import (
    FP8_BLOCK,
    INT4,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    NVFP4_ROWS,
    BlockScaledFormat,
    round_up,
)

REPRESENTATIVE_FORMATS: dict[str, BlockScaledFormat] = {
    format.name: format for format in (MXFP8, MXFP8_2D, NVFP4, FP8_BLOCK, NVFP4_ROWS, INT4)
}
"""By name: two quantized directions, a shared one, transposed ones with packed elements and with
partial blocks, and rows alone with a global amax and with scales of two bytes.

``fp8_block_fp32`` differs from ``fp8_block`` by its scales alone, ``mxfp8_rows`` and ``mxfp4`` from
``int4`` by their encodings, ``int4_g128`` by its length; they run where that matters.
"""


def fitting(format: BlockScaledFormat, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return ``shape`` with as many columns as whole blocks of ``format`` need."""
    return (*shape[:2], round_up(shape[2], format.dimension_multiple))
