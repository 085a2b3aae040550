"""The formats once more, one element at a time, from the definitions and in plain Python.

Nothing here is shared with the package. A Python float is a double: the product of two fp32 values
is exact in it, and a quotient survives the second rounding, so :func:`fp32` after each operation
is fp32 arithmetic. Codes are found by searching all values of an encoding, not by bit tricks.
"""

import bisect
import math
import struct
from functools import partial

FLT_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
FLT_MIN = 2.0**-126
BF16_MAX = 2.0**128 - 2.0**120


def fp32(value):
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def fp32_bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bf16(value):
    """Round an fp32 value to bf16, ties to even."""
    if math.isnan(value):
        return math.nan
    bits = fp32_bits(value)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


E4M3_MAGNITUDES = [
    (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
    for code in range(0x7F)
]
E2M1_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _nearest(magnitudes, magnitude):
    """Return the index of the nearest of ascending magnitudes, the even one of two."""
    below = bisect.bisect_right(magnitudes, magnitude) - 1
    if below == len(magnitudes) - 1:
        return below
    middle = (magnitudes[below] + magnitudes[below + 1]) / 2
    if magnitude == middle:
        return below + (below & 1)
    return below + (magnitude > middle)


def e4m3(value):
    if math.isnan(value):
        return 0x7F
    return (0x80 if math.copysign(1, value) < 0 else 0) | _nearest(E4M3_MAGNITUDES, abs(value))


def e4m3_value(code):
    return math.copysign(E4M3_MAGNITUDES[code & 0x7F], -1 if code & 0x80 else 1)


def e2m1(value):
    if math.isnan(value):
        return 7
    return (8 if math.copysign(1, value) < 0 else 0) | _nearest(E2M1_MAGNITUDES, abs(value))


def e8m0(value):
    """Return the byte of the smallest power of two from ``value`` up, 0xFE at most."""
    return next((code for code in range(0xFF) if 2.0 ** (code - 127) >= value), 0xFE)


def amax(values):
    return max((abs(value) for value in values if not math.isnan(value)), default=0.0)


def blocks_of(rows, cols, block_rows, block_cols):
    """Yield every block as its block coordinates and the coordinates of its elements."""
    for block_row in range(-(-rows // block_rows)):
        for block_col in range(-(-cols // block_cols)):
            yield (
                (block_row, block_col),
                [
                    (row, col)
                    for row in range(
                        block_row * block_rows, min(rows, (block_row + 1) * block_rows)
                    )
                    for col in range(
                        block_col * block_cols, min(cols, (block_col + 1) * block_cols)
                    )
                ],
            )


def _e8m0_blocks(weight, block_rows, block_cols):
    """Return data codes by element and scale codes by block."""
    data, scale = {}, {}
    for block, elements in blocks_of(len(weight), len(weight[0]), block_rows, block_cols):
        code = e8m0(fp32(amax(weight[row][col] for row, col in elements) * fp32(1 / 448)))
        scale[block] = code
        for row, col in elements:
            data[row, col] = e4m3(fp32(weight[row][col] * 2.0 ** (127 - code)))
    return data, scale


def _transposed(entries):
    return {(col, row): entry for (row, col), entry in entries.items()}


def mxfp8(weight):
    rowwise_data, rowwise_scale = _e8m0_blocks(weight, 1, 32)
    columnwise_data, columnwise_scale = _e8m0_blocks(weight, 32, 1)
    return {
        "rowwise_data": rowwise_data,
        "rowwise_scale": rowwise_scale,
        "columnwise_data": columnwise_data,
        "columnwise_scale": columnwise_scale,
    }


def mxfp8_2d(weight):
    data, scale = _e8m0_blocks(weight, 32, 32)
    return {
        "rowwise_data": data,
        "rowwise_scale": scale,
        "columnwise_scale": _transposed(scale),
    }


def mxfp8_rows(weight):
    data, scale = _e8m0_blocks(weight, 1, 32)
    return {"rowwise_data": data, "rowwise_scale": scale}


def mxfp4(weight):
    codes, scale = {}, {}
    for block, elements in blocks_of(len(weight), len(weight[0]), 1, 32):
        code = e8m0(fp32(amax(weight[row][col] for row, col in elements) * fp32(1 / 6)))
        scale[block] = code
        for row, col in elements:
            codes[row, col] = e2m1(fp32(weight[row][col] * 2.0 ** (127 - code)))
    return {"rowwise_data": _packed(codes), "rowwise_scale": scale}


def int4(weight, length=32):
    codes, scale = {}, {}
    for block, elements in blocks_of(len(weight), len(weight[0]), 1, length):
        step = fp32(amax(weight[row][col] for row, col in elements) * fp32(1 / 7))
        step = max(step, fp32(1e-5))
        scale[block] = bf16(step)
        for row, col in elements:
            codes[row, col] = 8 + _nearest_integer(weight[row][col], step)
    return {"rowwise_data": _packed(codes), "rowwise_scale": scale}


def _nearest_integer(value, step):
    if math.isnan(value) or math.isinf(value) and math.isinf(step):
        return 7
    return round(fp32(value / step))


def fp8_block(weight, with_powers_of_two=True):
    data, inverse = {}, {}
    for block, elements in blocks_of(len(weight), len(weight[0]), 128, 128):
        block_amax = amax(weight[row][col] for row, col in elements)
        scale = 1.0
        if 0 < block_amax < math.inf:
            scale = min(fp32(448 / block_amax), BF16_MAX)
            if with_powers_of_two:
                scale = 2.0 ** (math.frexp(scale)[1] - 1)
        inverse[block] = fp32(1 / scale)
        for row, col in elements:
            data[row, col] = e4m3(fp32(weight[row][col] * scale))
    return {
        "rowwise_data": data,
        "rowwise_scale": inverse,
        "columnwise_data": _transposed(data),
        "columnwise_scale": _transposed(inverse),
    }


def _e4m3_blocks(weight, block_rows):
    """Return nibbles by element, scale codes by block of 16 columns, and the global amax."""
    global_amax = amax(value for row in weight for value in row)
    global_encode = 1.0
    if 0 < global_amax < math.inf:
        global_encode = min(fp32(2688 / max(global_amax, FLT_MIN)), FLT_MAX)
    codes, scale = {}, {}
    for block, elements in blocks_of(len(weight), len(weight[0]), block_rows, 16):
        block_amax = amax(weight[row][col] for row, col in elements)
        code = e4m3(fp32(block_amax * fp32(global_encode * fp32(1 / 6))))
        scale[block] = code
        decoded = fp32(e4m3_value(code) * fp32(1 / global_encode))
        factor = min(fp32(1 / decoded), FLT_MAX) if decoded > 0 else FLT_MAX
        for row, col in elements:
            codes[row, col] = e2m1(fp32(weight[row][col] * factor))
    return codes, scale, global_amax


def nvfp4_rows(weight):
    codes, scale, global_amax = _e4m3_blocks(weight, 1)
    return {
        "rowwise_data": _packed(codes),
        "rowwise_scale": scale,
        "global_amax": global_amax,
    }


def nvfp4(weight):
    codes, scale, global_amax = _e4m3_blocks(weight, 16)
    return {
        "rowwise_data": _packed(codes),
        "rowwise_scale": scale,
        "columnwise_data": _packed(_transposed(codes)),
        "columnwise_scale": _transposed(scale),
        "global_amax": global_amax,
    }


def _packed(codes):
    return {
        (row, col // 2): code | codes[row, col + 1] << 4
        for (row, col), code in codes.items()
        if col % 2 == 0
    }


QUANTIZE = {
    "mxfp8": mxfp8,
    "mxfp8_2d": mxfp8_2d,
    "nvfp4": nvfp4,
    "fp8_block": fp8_block,
    "fp8_block_fp32": partial(fp8_block, with_powers_of_two=False),
    "mxfp8_rows": mxfp8_rows,
    "mxfp4": mxfp4,
    "nvfp4_rows": nvfp4_rows,
    "int4": int4,
    "int4_g128": partial(int4, length=128),
}
"""Format name -> function of one expert as rows of bf16 values, giving buffers by field name."""
