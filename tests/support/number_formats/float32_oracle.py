"""INT4 once more, in numpy's fp32 and from the published lines.

Nothing here is shared with the package. numpy divides, multiplies and rounds like IEEE 754.
"""

import numpy as np

F32 = np.float32


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
