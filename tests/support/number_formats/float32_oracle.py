"""INT4 and FP8 blocks with fp32 scales once more, in numpy's fp32 and from the published lines.

Nothing here is shared with the package. numpy divides, multiplies and rounds like IEEE 754.
"""

import numpy as np

F32 = np.float32
BF16_MAX = F32(2.0**128 - 2.0**120)


def to_bf16(value):
    """Round fp32 to bf16, ties to even, kept in fp32; not for NaN."""
    bits = np.asarray(value, F32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(F32)


def int4(weight, length, *, divide=False, smallest=1e-5):
    """Return fp32 scales [n] and rounded quotients [n, length] of blocks along rows.

    As ``fake_int4_quant_cuda.cu`` of slime and miles::

        scale = fmaxf(block_max * (1.0f / 7.0f), 1e-5f);    val = rintf(val / scale);

    With ``divide``, amax / 7 as in Megatron-Bridge and in the training of slime and miles.
    """
    blocks = np.asarray(weight, F32).reshape(-1, length)
    amax = np.fmax.reduce(np.abs(blocks), 1)
    scale = amax / F32(7) if divide else amax * (F32(1) / F32(7))
    scale = np.fmax(scale, F32(smallest))
    return scale, np.rint(blocks / scale[:, None])


def e4m3(value):
    """Return the E4M3 codes of fp32 values, ties to even, saturating; not for NaN."""
    codes = np.arange(0x7F)
    steps = np.where(codes < 8, codes, 8 + codes % 8).astype(np.float64)
    magnitudes = np.ldexp(steps, np.maximum(codes // 8, 1) - 10)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = np.searchsorted(middles, np.abs(value), "left")
    above = np.searchsorted(middles, np.abs(value), "right")
    return (np.where(below % 2, above, below) | np.signbit(value) * 0x80).astype(np.uint8)


def fp32_scale(amax):
    """Return the factors of FP8 blocks of fp32 amaxes, and the stored inverses.

    As ``compute_scale_from_types`` of Transformer Engine for bf16 weights, without powers of two::

        scale = (isinf(amax) || amax == 0.f) ? 1.f : __fdiv_rn(448.f, amax);    Inf: BF16_MAX
        scale_inv = __frcp_rn(scale)
    """
    amax = np.asarray(amax, F32)
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.minimum(F32(448) / amax, BF16_MAX)
        scale = np.where((amax == 0) | np.isinf(amax), F32(1), scale)
        return scale, F32(1) / scale


def fp8_block_fp32(block):
    """Return the stored inverse of one block, and its codes: the products are fp32."""
    block = np.asarray(block, F32)
    scale, inverse = fp32_scale(np.fmax.reduce(np.abs(block), None))
    return inverse, e4m3(block * scale)
