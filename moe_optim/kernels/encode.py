# mypy: allow-incomplete-defs

"""Triton helpers for rounding, maxima and encoding, as ``formats.reference`` defines them."""

import triton
import triton.language as tl

# Hopper converts a pair as fast as a single value, and on another unit: single conversions compete
# with division and square root.
_ROUND_PAIR = tl.constexpr("""{
.reg .b32 pair;
cvt.rn.bf16x2.f32 pair, $3, $2;
shl.b32 $0, pair, 16;
and.b32 $1, pair, -65536;
}""")


@triton.jit
def round_to_bf16(value):
    """Return fp32 ``value`` rounded to bf16, as fp32; bf16 input is only widened."""
    if value.dtype == tl.bfloat16 or not value.type.is_block():
        return value.to(tl.bfloat16).to(tl.float32)
    return tl.inline_asm_elementwise(
        _ROUND_PAIR, "=f,=f,f,f", [value], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def amax(value, axis: tl.constexpr):
    """Return the largest magnitude of fp32 ``value`` along ``axis``; NaN counts as zero."""
    return tl.maximum(tl.max(tl.abs(value), axis), 0.0)  # tl.max of only NaN is NaN


@triton.jit
def larger_magnitude(largest, values):
    """Return the maximum of fp32 ``largest`` and the magnitude of ``values``, ignoring NaN."""
    return tl.maximum(largest, tl.abs(values.to(tl.float32)))


@triton.jit
def e8m0_round_up(value):
    """Return the E8M0 code, int32, of the smallest power of two that is at least fp32 ``value``.

    Values must be neither negative nor NaN; those above 2^127, Inf included, give 0xFE.
    """
    bits = value.to(tl.int32, bitcast=True)
    # Adding the mantissa mask carries into the exponent exactly if the mantissa is nonzero.
    exponent = tl.minimum((bits + 0x7FFFFF) >> 23, 0xFE)
    return tl.where(bits <= 0x400000, 0, exponent)  # 0x400000 is 2^-127, a subnormal


@triton.jit
def power_of_two(code):
    """Return 2^(code - 127) in fp32 for int32 codes up to 0xFE."""
    bits = tl.where(code == 0, 0x400000, code << 23)  # 2^-127 has no exponent bits
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_reciprocal(code):
    """Return 2^(127 - code) in fp32 for int32 codes up to 0xFE."""
    return power_of_two(254 - code)


@triton.jit
def fp8_block_code(amax):
    """Return the int32 exponent code of the largest power of two up to 448 / ``amax``.

    The code is at most 254, and 127 (a scale of 1) for zero and Inf. ``amax`` is fp32, not
    negative, with at most 16 mantissa bits.
    """
    bits = amax.to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2^8: a mantissa above 1.75 makes the quotient's mantissa less than 1.
    code = 262 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where((bits == 0) | (bits >= 0x7F800000), 127, tl.minimum(code, 254))


@triton.jit
def fp8_block_factor(amax):
    """Return 448 / ``amax``, at most the largest bf16; 1 for zero and Inf.

    ``amax`` is fp32, not negative, of bf16 precision.
    """
    factor = tl.minimum(tl.div_rn(448.0, amax), 3.3895313892515355e38)
    return tl.where((amax == 0) | (amax == float("inf")), 1.0, factor)


@triton.jit
def nvfp4_global_encode(amax):
    """Return 448 * 6 / ``amax`` of an expert, at most FLT_MAX; 1 for zero and Inf."""
    scale = tl.div_rn(2688.0, tl.maximum(amax, 1.1754943508222875e-38))
    scale = tl.minimum(scale, 3.4028234663852886e38)
    return tl.where((amax == 0) | (amax == float("inf")), 1.0, scale)


@triton.jit
def encode_e4m3(value):
    """Return the nearest E4M3 code, uint8, of fp32 ``value``, ties to even.

    The hardware saturates: magnitudes above 448, Inf included, give 448 with their sign. NaN gives
    0x7F; zero keeps its sign.
    """
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def encode_e2m1_pairs(values):
    """Return the nearest E2M1 codes of fp32 pairs [..., 2], packed low nibble first, uint8 [...].

    Ties round to even. Magnitudes above 6, Inf included, give 6 with their sign; zero and values
    that round to it keep their sign; NaN gives +6.
    """
    first, second = tl.split(values)
    first, second = tl.minimum(first, 6.0), tl.minimum(second, 6.0)  # NaN gives 6
    codes = _nearest_e2m1(first) + (_nearest_e2m1(second) << 4)
    signs = (first.to(tl.int32, bitcast=True) >> 28) & 0x08
    signs |= (second.to(tl.int32, bitcast=True) >> 24) & 0x80
    return ((codes & 0x77) | signs).to(tl.uint8)


@triton.jit
def divide(value, divisor):
    """Return fp32 ``value`` / ``divisor`` as IEEE rounds it, for INT4; one reciprocal per divisor.

    Divisors are scales of blocks, [..., 1], and values are bf16 numbers up to the amax. Tiny
    quotients, which encode as zero, may be off.
    """
    reciprocal = tl.div_rn(1.0, divisor)
    quotient = value * reciprocal
    # The remainder is exact, so adding its quotient rounds once; Inf has a reciprocal of zero.
    finite = tl.minimum(divisor, 3.4028234663852886e38)
    remainder = tl.fma(-quotient, tl.broadcast_to(finite, value.shape), value)
    return tl.fma(remainder, tl.broadcast_to(reciprocal, value.shape), quotient)


@triton.jit
def encode_int4_pairs(values):
    """Return the nearest integers of fp32 pairs [..., 2] plus 8, packed low nibble first, uint8.

    Ties round to even. Integers saturate at -8 and 7, Inf included; NaN gives 7.
    """
    first, second = tl.split(values)
    return (_nearest_int4(first) | _nearest_int4(second) << 4).to(tl.uint8)


@triton.jit
def _nearest_int4(value):
    """Return the int32 nibble of a value: its nearest integer, from -8 to 7, plus 8."""
    RINT: tl.constexpr = 12582912.0  # 1.5 * 2^23, as below
    value = tl.maximum(tl.minimum(value, 7.0), -8.0)  # NaN gives 7
    return (value + (RINT + 8)).to(tl.int32, bitcast=True) & 0xF


@triton.jit
def _nearest_e2m1(value):
    """Return an int32 whose low byte is the E2M1 code, 0 to 7, of a magnitude."""
    # code = min(rint(2v), 2 + rint(v), 4 + rint(v / 2)): each term is exact in its own binade and
    # too large in the others. Adding 1.5 * 2^23 computes the rint in the low bits.
    RINT: tl.constexpr = 12582912.0
    magnitude = tl.minimum(tl.abs(value), 6.0)
    halves, ones = magnitude * 2.0 + RINT, magnitude + (RINT + 2)
    twos = magnitude * 0.5 + (RINT + 4)
    return tl.minimum(tl.minimum(halves, ones), twos).to(tl.int32, bitcast=True)


@triton.jit
def round_to_int4(value):
    """Return the nearest integer, -8 to 7, of fp32 ``value``, in fp32; NaN gives 7."""
    RINT: tl.constexpr = 12582912.0  # 1.5 * 2^23, as above
    return (tl.maximum(tl.minimum(value, 7.0), -8.0) + RINT) - RINT


@triton.jit
def round_to_e2m1(value):
    """Return the E2M1 value that :func:`encode_e2m1_pairs` encodes fp32 ``value`` as, in fp32."""
    RINT: tl.constexpr = 12582912.0  # adding 1.5 * 2^23 times a step rounds to its multiples
    value = tl.minimum(value, 6.0)  # NaN gives 6
    magnitude = tl.minimum(tl.abs(value), 6.0)
    rint = tl.where(magnitude < 2.0, 0.5 * RINT, tl.where(magnitude < 4.0, RINT, 2.0 * RINT))
    rounded = ((magnitude + rint) - rint).to(tl.int32, bitcast=True)
    sign = value.to(tl.int32, bitcast=True) & -2147483648
    return (rounded | sign).to(tl.float32, bitcast=True)
