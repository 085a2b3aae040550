"""E8M0: one byte b is the power of two 2^(b - 127). There is no zero; 0xFF is NaN."""

from functools import cache

import torch
from torch import Tensor


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
