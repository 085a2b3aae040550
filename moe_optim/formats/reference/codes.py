"""Encoding and decoding of low-precision numbers.

E4M3: sign, four exponent bits of bias 7, three mantissa bits; no Inf, 0x7F and 0xFF are NaN.
E2M1: sign, two exponent bits, one mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4, 6, no Inf, no NaN.
INT4: nibble n is n - 8, as in compressed-tensors' ``pack_to_int32``.
E8M0: byte b is the power of two 2^(b - 127); no zero, 0xFF is NaN.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from moe_optim.formats import Element

E4M3_NAN = 0x7F
"""Code of every NaN, of either sign."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7; bit 3 is the sign."""

_E4M3_STEP = 2.0**-9


def encode_e4m3(value: Tensor) -> Tensor:
    """Return the nearest E4M3 code, uint8, of every value, ties to even.

    Magnitudes above 448, Inf included, give 448 with their sign; NaN gives 0x7F; zero keeps its
    sign.
    """
    codes = _e4m3_codes(value)
    if not codes.numel() or int((codes & E4M3_NAN).max()) < E4M3_NAN:
        return codes
    # torch's cast overflows to NaN, and keeps the sign of NaN
    codes = _e4m3_codes(value.clamp(-448.0, 448.0))
    return codes.masked_fill_(value.isnan(), E4M3_NAN)


def decode_e4m3(code: Tensor) -> Tensor:
    """Return the fp32 values of uint8 E4M3 codes, exactly."""
    return code.view(torch.float8_e4m3fn).float()


def encode_e2m1(value: Tensor) -> Tensor:
    """Return the nearest E2M1 code, uint8, of every fp32 value, ties to even, one per byte.

    Magnitudes above 6, Inf included, give 6 with their sign; zero and values that round to it keep
    their sign; NaN gives +6, as in the hardware instruction.
    """
    # With v = 2|value|, code = min(rint(v), 2 + rint(v / 2), 4 + rint(v / 4), 7): each term is
    # exact in its own binade and too large in the others. The cast to E4M3 computes the rint: code
    # n <= 8 is n * 2^-9, and larger values give larger codes.
    steps = value * (2 * _E4M3_STEP)
    codes = _e4m3_codes(steps)
    sign = (codes & 0x80) >> 4
    code = codes & 0x7F
    code = torch.minimum(code, (_e4m3_codes(steps.mul_(0.5)) & 0x7F) + 2)
    code = torch.minimum(code, (_e4m3_codes(steps.mul_(0.5)) & 0x7F) + 4).clamp_(max=7)
    code |= sign
    return code.masked_fill_(value.isnan(), 7)


def encode_int4(value: Tensor) -> Tensor:
    """Return the nearest integer of every fp32 value plus 8, uint8, ties to even, one per byte.

    Integers saturate at -8 and 7, Inf included; NaN gives 7.
    """
    return value.nan_to_num(nan=7.0).clamp(-8.0, 7.0).round().add(8.0).to(torch.uint8)


def pack_nibbles(code: Tensor) -> Tensor:
    """Return two codes per byte, even columns in low nibbles: [..., C] -> [..., C/2] uint8."""
    pairs = code.contiguous().view(torch.int16)  # even column | odd column << 8
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Return one code per byte: [..., C/2] -> [..., C] uint8. Inverts :func:`pack_nibbles`."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def decode_e2m1(data: Tensor) -> Tensor:
    """Return the fp32 values of packed codes: [..., C/2] uint8 -> [..., C]."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=data.device)
    table = torch.cat((values, -values))
    codes = unpack_nibbles(data)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def decode_int4(data: Tensor) -> Tensor:
    """Return the fp32 integers of packed codes: [..., C/2] uint8 -> [..., C]."""
    return unpack_nibbles(data).float() - 8.0


def decode(element: Element, data: Tensor) -> Tensor:
    """Return the fp32 values of the codes in uint8 bytes [..., B], along the last dimension."""
    return _DECODERS[element](data)


_DECODERS: Mapping[Element, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"e4m3": decode_e4m3, "e2m1": decode_e2m1, "int4": decode_int4}
)


def _e4m3_codes(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn).view(torch.uint8)


def e8m0_round_up(value: Tensor) -> Tensor:
    """Return the E8M0 code, uint8, of the smallest power of two that is at least fp32 ``value``.

    Values above 2^127, +Inf included, give 0xFE; values up to 2^-127, zero included, give 0x00; NaN
    gives 0xFF. Negative values are not allowed.
    """
    bits = value.view(torch.int32)
    # Adding the mantissa mask carries into the exponent exactly if the mantissa is nonzero.
    exponent = (bits + 0x7FFFFF) >> 23
    exponent = exponent.masked_fill(bits <= 0x400000, 0)  # 0x400000 is 2^-127, a subnormal
    return exponent.clamp(max=0xFE).masked_fill(value.isnan(), 0xFF).to(torch.uint8)


def decode_e8m0(code: Tensor) -> Tensor:
    """Return 2^(code - 127) of uint8 codes in bf16, exactly; 0xFF gives NaN."""
    return _powers(code.device).index_select(0, code.flatten().int()).view(code.shape)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """Return 2^(127 - code) of uint8 codes in bf16, to encode data; 0xFF gives NaN."""
    return decode_e8m0(254 - code)  # 0xFF wraps around to itself


@cache
def _powers(device: torch.device) -> Tensor:
    values = (torch.arange(256, dtype=torch.float64, device="cpu") - 127).exp2().bfloat16()
    values[0xFF] = torch.nan
    return values.to(device)
