"""E2M1: sign, two exponent bits, one mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4, 6 and no NaN or Inf."""

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of the codes 0 to 7; bit 3 is the sign."""

_E4M3_STEP = 2.0**-9


def encode_e2m1(value: Tensor, *, has_nan: bool = True) -> Tensor:
    """Return the nearest E2M1 code of every value, ties to even, one code a byte.

    Values beyond 6, Inf included, give 6 with their sign; zero and what rounds to it keep their
    sign; NaN gives +6, as the conversion instruction of the hardware does.

    Args:
        value: fp32 of any shape.
        has_nan: False promises that there is no NaN, and is faster.

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
