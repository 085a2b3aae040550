"""Tensors with the fields of Transformer Engine's weights, which cannot be made without a GPU."""

import torch

from moe_optim import reference
from moe_optim.formats import DIRECTIONS, BlockScaledFormat

SPOILED = 0xA5  # of bytes that have to be overwritten


class StandIn:
    """What the storage reads and writes: fields, shape and dimensions."""

    def __init__(self, format: BlockScaledFormat, master: torch.Tensor) -> None:
        self.shape = master.shape
        quantized = reference.quantize(master.unsqueeze(0), format)
        self._rowwise_data = quantized.rowwise_data[0].clone()
        self._columnwise_data = quantized.columnwise_data[0].clone()
        for direction in DIRECTIONS:
            setattr(self, f"_{direction}_scale_inv", padded_scale(quantized, direction))
        self._high_precision_init_val = master.bfloat16()

    def dim(self) -> int:
        return len(self.shape)


class Float8BlockwiseQTensor(StandIn):
    """Named as the class it stands for, which is how the format is found."""

    _is_2D_scaled = True


class MXFP8Tensor(StandIn):
    """Named as the class it stands for."""

    _with_gemm_swizzled_scales = False


def padded_scale(quantized, direction) -> torch.Tensor:
    """Return the scales of one expert as Transformer Engine keeps them, by indexing alone."""
    format, (_, rows, cols) = quantized.format, quantized.shape
    stored = torch.zeros(
        format.storage_scale_shape(rows, cols, direction), dtype=format.scale_dtype
    )
    scale = quantized.rowwise_scale[0]
    if direction == "columnwise" and not format.is_2d:
        scale = quantized.columnwise_scale[0]
    elif direction == "columnwise" and format.transposes("columnwise"):
        scale = scale.t()
    down, across = format.storage_scale_repeat(direction)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            stored[i * down : (i + 1) * down, j * across : (j + 1) * across] = scale[i, j]
    return stored
