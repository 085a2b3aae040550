"""Fake quantization: values on a low-precision grid, as NVIDIA ModelOpt 0.47 has them to the bit.

``modelopt/torch/quantization/tensor_quant.py``: integers as ``_tensor_quant`` has them, E4M3 as
``_fp8_eager`` has it, gradients as ``_fake_tensor_quant_backward`` has them. All of it in fp32.
"""

import torch
from torch import Tensor

ZERO_AMAX = 2.0**-24
"""Largest amax that counts as zero."""
E4M3_MAX = 448.0


def fake_quantize(
    values: Tensor, amax: Tensor, bits: int | None, *, narrow_range: bool = False
) -> Tensor:
    """Return every value as the nearest one of its grid, ties to even, in the dtype it came in.

    NaN stays NaN; Inf and all beyond the grid give its last value. An amax of NaN or Inf gives NaN.

    Args:
        values: fp32, bf16 or fp16.
        amax: value of the last code of the grid, of a shape that broadcasts.
        bits: bits of an integer grid; None for E4M3.
        narrow_range: whether integers end at ``-max`` and not at ``-max - 1``.
    """
    amax = amax.float()
    is_zero = amax <= ZERO_AMAX
    smallest, largest = code_range(bits, narrow_range)
    if bits is None:
        # torch computes 448 / amax and 1 / scale as products with a rounded reciprocal.
        scale = torch.where(is_zero, 1.0, amax).reciprocal() * largest
        scaled = (values.float() * scale).clamp(smallest, largest)
        return (scaled.to(torch.float8_e4m3fn).float() * scale.reciprocal()).to(values.dtype)
    scale = torch.where(is_zero, 0.0, torch.full_like(amax, largest) / amax)
    codes = (values.float() * scale).round().clamp(smallest, largest)
    return (codes / torch.where(is_zero, 1.0, scale)).to(values.dtype)


def clip_gradient(values: Tensor, amax: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient where the magnitude of a value is at most its amax, else zero.

    Args:
        values: quantized values.
        amax: fp32 or convertible, of a shape that broadcasts.
        gradient: gradient of the quantized values, in the dtype of ``values``.
    """
    return torch.where(values.abs().float() <= amax.float(), gradient, 0.0)


def code_range(bits: int | None, narrow_range: bool) -> tuple[float, float]:
    """Return the smallest and the largest code of a grid."""
    if bits is None:
        return -E4M3_MAX, E4M3_MAX
    largest = 2.0 ** (bits - 1) - 1
    return -largest if narrow_range else -largest - 1, largest
