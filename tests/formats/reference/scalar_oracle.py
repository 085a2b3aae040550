"""Codes of single elements once more, from the definitions and in plain Python.

Nothing here is shared with the package. A Python float is a double: the product of two fp32 values
is exact in it, and a quotient survives the second rounding, so :func:`fp32` after each operation
is fp32 arithmetic. Codes are found by searching all values of an encoding, not by bit tricks.
"""

import bisect
import math
import struct

FLT_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


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


def amax(values):
    return max((abs(value) for value in values if not math.isnan(value)), default=0.0)
