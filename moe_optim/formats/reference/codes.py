"""Codes of low-precision numbers, and back to values.

E4M3: sign, four exponent bits of bias 7, three mantissa bits; no Inf, 0x7F and 0xFF are NaN.
E2M1: sign, two exponent bits, one mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4, 6, no Inf, no NaN.
E8M0: one byte b is the power of two 2^(b - 127). There is no zero; 0xFF is NaN.
"""

from functools import cache

import torch
from torch import Tensor

E4M3_NAN = 0x7F
"""The code of every NaN, whatever its sign."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of the codes 0 to 7; bit 3 is the sign."""

_E4M3_STEP = 2.0**-9


def encode_e4m3_(out: Tensor, value: Tensor, *, saturate: bool = True) -> None:
    """Write the nearest E4M3 code of every value into ``out``, ties to even.

    Values beyond 448, Inf included, give 448 with their sign; NaN gives 0x7F; zero keeps its sign.

    Args:
        out: uint8 of the shape of ``value``; overwritten.
        value: fp32 or bf16.
        saturate: whether there may be NaN or magnitudes above 448; without, it is faster.
    """
    codes = out.view(torch.float8_e4m3fn)
    if not saturate:
        codes.copy_(value)
        return
    codes.copy_(value.clamp(-448.0, 448.0))  # torch's cast makes NaN of what is too large
    out.masked_fill_(value.isnan(), E4M3_NAN)  # and keeps the sign of a NaN


def encode_e4m3(value: Tensor) -> Tensor:
    """Return the E4M3 codes of ``value`` as uint8, like :func:`encode_e4m3_` with saturation."""
    out = torch.empty(value.shape, dtype=torch.uint8, device=value.device)
    encode_e4m3_(out, value)
    return out


def decode_e4m3(code: Tensor) -> Tensor:
    """Return the fp32 values of uint8 E4M3 codes, exactly."""
    return code.view(torch.float8_e4m3fn).float()


def encode_e2m1(value: Tensor, *, has_nan: bool = True) -> Tensor:
    """Return the nearest E2M1 code of every value, ties to even, one code a byte.

    Values beyond 6, Inf included, give 6 with their sign; zero and what rounds to it keep their
    sign; NaN gives +6, as the conversion instruction of the hardware does.

    Args:
        value: fp32 of any shape.
        has_nan: whether there may be NaN; without, it is faster.

    Returns:
        uint8 codes 0 to 15 of the same shape.
    """
    # With v = 2|value| the code is min(rint(v), 2 + rint(v / 2), 4 + rint(v / 4), 7): each term is
    # right in its own binade and too large in the others. The cast to E4M3 is the rint: its codes
    # 0 to 8 are that many steps of 2^-9, and larger values only give larger codes.
    steps = value * (2 * _E4M3_STEP)
    codes = _e4m3_codes(steps)
    sign = (codes & 0x80) >> 4
    code = codes & 0x7F
    code = torch.minimum(code, (_e4m3_codes(steps.mul_(0.5)) & 0x7F) + 2)
    code = torch.minimum(code, (_e4m3_codes(steps.mul_(0.5)) & 0x7F) + 4).clamp_(max=7)
    code |= sign
    return code.masked_fill_(value.isnan(), 7) if has_nan else code


def pack_e2m1(code: Tensor) -> Tensor:
    """Return two codes a byte along the last dimension, the even column in the low nibble.

    Args:
        code: [..., C] uint8 codes 0 to 15, C even.

    Returns:
        [..., C/2] uint8.
    """
    pairs = code.contiguous().view(torch.int16)  # even column | odd column << 8
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_e2m1(data: Tensor) -> Tensor:
    """Return one code a byte: the inverse of :func:`pack_e2m1`, [..., C/2] -> [..., C] uint8."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def decode_e2m1(data: Tensor) -> Tensor:
    """Return the fp32 values of packed codes: [..., C/2] uint8 -> [..., C]."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=data.device)
    table = torch.cat((values, -values))
    codes = unpack_e2m1(data)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _e4m3_codes(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn).view(torch.uint8)


def e8m0_round_up(value: Tensor) -> Tensor:
    """Return the byte of the smallest power of two that is at least ``value``.

    Args:
        value: fp32 of any shape, not negative.

    Returns:
        uint8 of the same shape. Saturates: all above 2^127 and +Inf give 0xFE. All up to 2^-127,
        zero included, give 0x00. NaN gives 0xFF.
    """
    bits = value.view(torch.int32)
    # Adding the mantissa mask carries into the exponent exactly if the mantissa is not zero.
    exponent = (bits + 0x7FFFFF) >> 23
    exponent = exponent.masked_fill(bits <= 0x400000, 0)  # 0x400000 is 2^-127, a subnormal
    return exponent.clamp(max=0xFE).masked_fill(value.isnan(), 0xFF).to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """Return 2^(code - 127) in bf16, which holds all of them; 0xFF gives NaN.

    Args:
        code: uint8 of any shape.
    """
    return _look_up(_powers(code.device), code)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """Return 2^(127 - code) in bf16, the factor that encodes data; 0xFF gives NaN.

    Args:
        code: uint8 of any shape.
    """
    return _look_up(_reciprocals(code.device), code)


def _look_up(table: Tensor, code: Tensor) -> Tensor:
    return table.index_select(0, code.flatten().int()).view(code.shape)


@cache
def _powers(device: torch.device) -> Tensor:
    return _table(torch.arange(256, dtype=torch.float64, device="cpu") - 127).to(device)


@cache
def _reciprocals(device: torch.device) -> Tensor:
    return _table(127 - torch.arange(256, dtype=torch.float64, device="cpu")).to(device)


def _table(exponents: Tensor) -> Tensor:
    values = exponents.exp2().bfloat16()
    values[0xFF] = torch.nan
    return values
