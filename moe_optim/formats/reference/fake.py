"""Fake quantization: values on a low-precision grid, and those of block-scaled formats.

Grids are bit-identical to NVIDIA ModelOpt 0.47, ``modelopt/torch/quantization/tensor_quant.py``:
``_tensor_quant`` for integers, ``_fp8_eager`` for E4M3, ``_fake_tensor_quant_backward`` for
gradients. All computation is in fp32.
"""

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat
from moe_optim.formats.reference import dequantize_bf16, quantize

ZERO_AMAX = 2.0**-24
"""Largest amax that counts as zero."""
E4M3_MAX = 448.0


def fake_quantize(
    values: Tensor, amax: Tensor, bits: int | None, *, narrow_range: bool = False
) -> Tensor:
    """Round every value to the nearest one of its grid, ties to even, keeping the dtype.

    NaN stays NaN; values beyond the grid, Inf included, saturate. An amax of NaN or Inf gives NaN.

    Args:
        values: fp32, bf16 or fp16.
        amax: value of the last code of the grid, of a broadcastable shape.
        bits: bits of an integer grid; None for E4M3.
        narrow_range: whether integers end at ``-max`` rather than ``-max - 1``.
    """
    amax = amax.float()
    is_zero = amax <= ZERO_AMAX
    smallest, largest = code_range(bits, narrow_range)
    if bits is None:
        # torch computes 448 / amax and 1 / scale by multiplying with a rounded reciprocal.
        scale = torch.where(is_zero, 1.0, amax).reciprocal() * largest
        scaled = (values.float() * scale).clamp(smallest, largest)
        return (scaled.to(torch.float8_e4m3fn).float() * scale.reciprocal()).to(values.dtype)
    scale = torch.where(is_zero, 0.0, torch.full_like(amax, largest) / amax)
    codes = (values.float() * scale).round().clamp(smallest, largest)
    return (codes / torch.where(is_zero, 1.0, scale)).to(values.dtype)


def clip_gradient(values: Tensor, amax: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient where the magnitude of a value is at most its amax, else zero."""
    return torch.where(values.abs().float() <= amax.float(), gradient, 0.0)


def fake_quantize_blocks(
    values: Tensor, format: BlockScaledFormat, *, name: str = "weight"
) -> Tensor:
    """Return the bf16 values that ``values`` [E, R, C] have when they are stored in ``format``.

    ``dequantize_bf16`` of ``quantize``, rowwise. ``values`` are fp32 or bf16; ``name`` is their
    name in errors.
    """
    q = quantize(values.detach(), format, name=name)
    return dequantize_bf16(q.rowwise_data, q.rowwise_scale, format, global_amax=q.global_amax)


def code_range(bits: int | None, narrow_range: bool) -> tuple[float, float]:
    """Return the smallest and the largest code of a grid."""
    if bits is None:
        return -E4M3_MAX, E4M3_MAX
    largest = 2.0 ** (bits - 1) - 1
    return -largest if narrow_range else -largest - 1, largest
