# mypy: allow-incomplete-defs

"""Kernel for dequantization: the bf16 values of a weight's buffers."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import power_of_two

_LEAST_AMAX = tl.constexpr(7.899322037525772e-36)  # 2688 * 2^-128
_NVFP4_UNIT = tl.constexpr(1.0 / 2688.0)


@triton.jit
def dequantize_kernel(
    data,  # [experts, rows, cols / elements per byte] uint8, as stored
    scales,  # [experts, block rows, block columns], of the strides below
    amaxes,  # [experts] fp32, or None for formats without a global amax
    result,  # [experts, rows, cols] bf16, or [experts, cols, rows] if TRANSPOSED
    rows,
    cols,
    scale_expert_stride,
    scale_row_stride,
    scale_col_stride,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """Write bf16 of code * scale for one tile of one expert; data is read as it is stored.

    Scales are rounded to bf16 first where they are fp32 powers of two. NVFP4 multiplies by
    ``(scale * amax of the expert) * fl(1 / 2688)``, as ``formats.reference`` does.

    Grid (tiles of all experts).
    """
    PACK: tl.constexpr = 1 if ELEMENT == "e4m3" else 2
    SCALE_ROWS: tl.constexpr = max(TILE_ROWS // BLOCK_ROWS, 1)
    SCALE_COLS: tl.constexpr = max(TILE_COLS // BLOCK_COLS, 1)
    across = tl.cdiv(cols, TILE_COLS)
    tiles = tl.cdiv(rows, TILE_ROWS) * across
    tile = tl.program_id(0) % tiles
    row = tile // across * TILE_ROWS
    col = tile % across * TILE_COLS
    expert = (tl.program_id(0) // tiles).to(tl.int64)

    line = row + tl.arange(0, TILE_ROWS)
    byte = col // PACK + tl.arange(0, TILE_COLS // PACK)
    width = cols // PACK
    start = data + expert * rows * width
    inside = (line < rows)[:, None] & (byte < width)[None, :]
    codes = tl.load(start + line[:, None].to(tl.int64) * width + byte[None, :], inside, other=0)

    down = row // BLOCK_ROWS + tl.arange(0, SCALE_ROWS)
    right = col // BLOCK_COLS + tl.arange(0, SCALE_COLS)
    here = (down < tl.cdiv(rows, BLOCK_ROWS))[:, None] & (right < tl.cdiv(cols, BLOCK_COLS))[
        None, :
    ]
    places = down[:, None] * scale_row_stride + right[None, :] * scale_col_stride
    stored = tl.load(scales + expert * scale_expert_stride + places, here, other=0)
    factors = _decode_scales(stored, amaxes, expert, SCALE)
    factors = tl.broadcast_to(
        factors[:, None, :, None],
        (SCALE_ROWS, TILE_ROWS // SCALE_ROWS, SCALE_COLS, TILE_COLS // SCALE_COLS),
    ).reshape(TILE_ROWS, TILE_COLS)

    values = (_decode(codes, ELEMENT) * factors).to(tl.bfloat16)
    column = col + tl.arange(0, TILE_COLS)
    target = result + expert * rows * cols
    if TRANSPOSED:
        inside = (column < cols)[:, None] & (line < rows)[None, :]
        target += column[:, None].to(tl.int64) * rows + line[None, :]
        tl.store(target, tl.trans(values), inside)
    else:
        inside = (line < rows)[:, None] & (column < cols)[None, :]
        target += line[:, None].to(tl.int64) * cols + column[None, :]
        tl.store(target, values, inside)


@triton.jit
def _decode(codes, ELEMENT: tl.constexpr):
    """Return the fp32 values of bytes; each of two elements gives neighbouring columns."""
    if ELEMENT == "e4m3":
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        low, high = codes.to(tl.int32) & 0xF, codes.to(tl.int32) >> 4
        values = tl.interleave(_decode_nibble(low, ELEMENT), _decode_nibble(high, ELEMENT))
    return values


@triton.jit
def _decode_nibble(code, ELEMENT: tl.constexpr):
    """Return the fp32 values of int32 codes of four bits."""
    if ELEMENT == "int4":
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0  # 2^23 + code
    else:  # 0, 0.5, 1, 1.5, 2, 3, 4, 6: exponent (code >> 1) - 1, one bit of mantissa
        bits = (code & 7) << 22
        bits = tl.where(bits < 0x800000, (code & 1) * 0x3F000000, bits + 0x3F000000)
        value = (bits | (code & 8) << 28).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _decode_scales(stored, amaxes, expert, SCALE: tl.constexpr):
    """Return the fp32 values of stored scales."""
    if SCALE == "e8m0":
        code = stored.to(tl.int32)
        factors = tl.where(code == 0xFF, float("nan"), power_of_two(code))
    elif SCALE == "e4m3":
        largest = tl.load(amaxes + expert)
        least = tl.where(largest != largest, largest, tl.maximum(largest, _LEAST_AMAX))
        factors = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32) * least * _NVFP4_UNIT
    elif SCALE == "power_of_two":
        factors = stored.to(tl.bfloat16).to(tl.float32)
    else:
        factors = stored.to(tl.float32)
    return factors
