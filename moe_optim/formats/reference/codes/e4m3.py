"""E4M3: sign, four exponent bits of bias 7, three mantissa bits; no Inf, 0x7F and 0xFF are NaN."""

import torch
from torch import Tensor

E4M3_NAN = 0x7F
"""The code of every NaN, whatever its sign."""


def encode_e4m3_(out: Tensor, value: Tensor, *, saturate: bool = True) -> None:
    """Write the nearest E4M3 code of every value into ``out``, ties to even.

    Values beyond 448, Inf included, give 448 with their sign; NaN gives 0x7F; zero keeps its sign.

    Args:
        out: uint8 of the shape of ``value``; overwritten.
        value: fp32 or bf16.
        saturate: False promises that there is no NaN and no magnitude above 448, and is faster.
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
