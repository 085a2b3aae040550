# mypy: allow-incomplete-defs

"""Triton helpers that round, measure and encode as ``moe_optim.reference`` defines it."""

import triton
import triton.language as tl


@triton.jit
def round_to_bf16(value):
    """Return fp32 ``value`` rounded to bf16, in fp32; bf16 is only widened."""
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def amax(value, axis: tl.constexpr):
    """Return the largest magnitude of fp32 ``value`` along ``axis``; NaN counts as zero."""
    return tl.maximum(tl.max(tl.abs(value), axis), 0.0)  # of NaN alone, the first gives NaN


@triton.jit
def e8m0_round_up(value):
    """Return the E8M0 code, int32, of the smallest power of two that is at least ``value``.

    Args:
        value: fp32, neither negative nor NaN. All above 2^127, Inf included, gives 0xFE.
    """
    bits = value.to(tl.int32, bitcast=True)
    # Adding the mantissa mask carries into the exponent exactly if the mantissa is not zero.
    exponent = tl.minimum((bits + 0x7FFFFF) >> 23, 0xFE)
    return tl.where(bits <= 0x400000, 0, exponent)  # 0x400000 is 2^-127, a subnormal


@triton.jit
def e8m0_reciprocal(code):
    """Return 2^(127 - code) in fp32 for int32 codes up to 0xFE."""
    bits = tl.where(code == 0xFE, 0x400000, (254 - code) << 23)  # 2^-127 has no exponent bits
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(value):
    """Return the nearest E4M3 code, uint8, of fp32 ``value``, ties to even.

    The hardware saturates: beyond 448, Inf included, gives 448 with its sign. NaN gives 0x7F, and
    zero keeps its sign.
    """
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
