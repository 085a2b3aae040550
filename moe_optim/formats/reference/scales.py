"""Scales and codes of blocks, given their maxima: the formula of each encoding, once.

With ``amax`` of a block and ``w`` rounded to bf16::

    mxfp8        scale = E8M0 of amax / 448, rounded up     code = E4M3 of w / scale
    mxfp4        scale = E8M0 of amax / 6, rounded up       code = E2M1 of w / scale
    fp8_block    scale = 1 / f, see encode_scale            code = E4M3 of w * f
    nvfp4        scale = E4M3 of amax / 6 * S               code = E2M1 of w / (scale / S)
    int4         s = max(amax * fl(1/7), 1e-5) in fp32      code = rint(w / s);  scale = bf16 of s

S of an expert is :func:`global_encode_scale`. MXFP4 rounds scales up as gpt-oss
(``triton_kernels``), DeepSeek-V4, ModelOpt and TE's MXFP8 do. INT4 follows the exporter of slime
and miles, whose training multiplies by s instead of its bf16.
"""

import torch
from torch import Tensor

from moe_optim.formats import NVFP4, BlockScaledFormat
from moe_optim.formats.reference.codes import (
    decode_e4m3,
    e8m0_reciprocal,
    e8m0_round_up,
    encode_e2m1,
    encode_e4m3,
    encode_int4,
    pack_nibbles,
)
from moe_optim.formats.reference.tensorwise import encode_scale as encode_tensor_scale

INT4_SMALLEST_SCALE = 1e-5
_FP32 = torch.finfo(torch.float32)
_GLOBAL_MAX = 448.0 * NVFP4.data_max


def encode_scales(
    format: BlockScaledFormat, amaxes: Tensor, global_amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the stored scales of blocks, and the factors of their weights.

    Args:
        format: format of the blocks.
        amaxes: amax of each block, fp32, ignoring NaN; of bf16 precision.
        global_amax: fp32 amax of the expert of each block, of a broadcastable shape; None for
            formats without.

    Returns:
        Scales of ``format.scale_dtype``, and factors for :func:`encode_elements`: bf16 for powers
        of two, else fp32.
    """
    if format.scale_encoding == "e8m0":
        code = e8m0_round_up(amaxes * (1.0 / format.data_max))
        return code, e8m0_reciprocal(code)
    if format.scale_encoding == "bf16":
        divisor = (amaxes * (1.0 / format.data_max)).clamp(min=INT4_SMALLEST_SCALE)
        return divisor.bfloat16(), divisor
    if format.scale_encoding in ("power_of_two", "fp32"):
        factor = encode_scale(amaxes, format)
        is_exact = format.scale_encoding == "power_of_two"
        return factor.reciprocal(), factor.bfloat16() if is_exact else factor
    assert global_amax is not None, "formats with E4M3 scales have a global amax"
    global_encode = global_encode_scale(global_amax)
    # Same association as TE, and multiplication by the rounded 1/6 instead of a division.
    code = encode_e4m3(amaxes * (global_encode * (1.0 / format.data_max)))
    decoded = decode_e4m3(code) * global_encode.reciprocal()
    return code, decoded.reciprocal().clamp(max=_FP32.max)


def global_encode_scale(global_amax: Tensor) -> Tensor:
    """Return 448 * 6 / amax of NVFP4 experts in fp32, at most FLT_MAX; 1 for zero and Inf."""
    amax = global_amax.clamp(min=_FP32.tiny)
    # Not `2688 / amax`, which torch computes by multiplying with a rounded reciprocal.
    scale = torch.div(torch.full_like(amax, _GLOBAL_MAX), amax).clamp(max=_FP32.max)
    return scale.masked_fill((global_amax == 0) | global_amax.isinf(), 1.0)


def decoding_amax(global_amax: Tensor) -> Tensor:
    """Return the amax whose 2688th part inverts :func:`global_encode_scale`; Inf stays Inf.

    Experts below 2688 / FLT_MAX are encoded as if this were their amax. Transformer Engine decodes
    with the amax itself, so its GEMMs and dequantization give smaller values for them.
    """
    return global_amax.clamp(min=_GLOBAL_MAX * 2.0**-128)


def encode_scale(amax: Tensor, format: BlockScaledFormat) -> Tensor:
    """Return the fp32 factor that encodes the weights of an FP8 block; its inverse is stored.

    It is 448 / amax rounded to nearest, at most the largest bf16, or the largest power of two up to
    that if ``format`` stores powers of two; 1 for an amax of zero, Inf or NaN. As in Transformer
    Engine's ``compute_scale_from_types`` of bf16 weights.
    """
    scale = encode_tensor_scale(amax).clamp(max=torch.finfo(torch.bfloat16).max)
    if format.scale_encoding == "fp32":
        return scale
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def encode_elements(format: BlockScaledFormat, values: Tensor, factor: Tensor) -> Tensor:
    """Return the data bytes of bf16 ``values`` [..., C], given broadcastable factors.

    Weights are multiplied by their factor; INT4 divides by it. Products of E4M3 formats with powers
    of two are exact in bf16, except where E4M3 rounds to zero.
    """
    if format.element == "e4m3":
        return encode_e4m3(values * factor)
    if format.element == "e2m1":
        return pack_nibbles(encode_e2m1(values.float() * factor))
    return pack_nibbles(encode_int4(torch.div(values.float(), factor)))
