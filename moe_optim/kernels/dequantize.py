"""Dequantization of a weight's buffers to bf16, in one launch where kernels are supported."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat, Direction, get_format
from moe_optim.formats.reference import dequantize_bf16
from moe_optim.formats.reference.dequantizing import values_shape
from moe_optim.kernels.plan import (
    ALIGNMENT,
    Backend,
    BoundKernel,
    current_device,
    is_capturing,
    takes_kernels,
)
from moe_optim.kernels.tuning import DEQUANTIZE, DEQUANTIZE_TRANSPOSED

_KEPT = 4096  # bound kernels of a few hundred bytes, one per shape and alignment


def dequantize(
    data: Tensor,
    scale: Tensor,
    format: BlockScaledFormat,
    direction: Direction = "rowwise",
    *,
    global_amax: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the values of one direction, as ``formats.reference.dequantize_bf16`` does.

    Args:
        data: uint8 buffer of ``direction``, as stored: of ``format.data_shape``, contiguous.
        scale: logical scales, of ``format.scale_shape`` and ``format.scale_dtype``, in any strides.
        format: format of the buffers.
        direction: direction of the buffers.
        global_amax: [E] fp32, required by formats with a global amax.
        backend: ``auto`` for a kernel where supported, ``reference`` for plain torch.

    Returns:
        [E, R, C] bf16, contiguous, newly allocated.

    Raises:
        LayoutError: ``scale`` or ``global_amax`` does not fit.
    """
    given = (data, scale, format, direction)
    if not takes_kernels(backend, data.device) or not data.is_contiguous():
        return dequantize_bf16(*given, global_amax=global_amax)
    shape = values_shape(data, format, direction)
    _check(scale, global_amax, format, shape, direction)
    result = torch.empty(shape, dtype=torch.bfloat16, device=data.device)
    if not result.numel():
        return result
    if format.columnwise_copy == "shared" and direction == "columnwise":
        scale = scale.mT  # scales of shared data are stored transposed
    amaxes = global_amax.contiguous() if global_amax is not None else None
    tensors = (data, scale, amaxes, result)
    aligned = tuple(one is not None and one.data_ptr() % ALIGNMENT == 0 for one in tensors)
    stored = (len(data), data.shape[1], data.shape[2] * format.elements_per_byte)
    with current_device(data.device):
        bound = _bind(format.name, direction, stored, scale.stride(), aligned, data.device)
        if not bound.is_compiled and is_capturing(data.device):  # which forbids loading code
            return dequantize_bf16(*given, global_amax=global_amax, out=result)
        bound(*tensors, *stored[1:], *scale.stride())
    return result


def _check(
    scale: Tensor,
    global_amax: Tensor | None,
    format: BlockScaledFormat,
    shape: tuple[int, int, int],
    direction: Direction,
) -> None:
    wanted = format.scale_shape(shape, direction)
    if tuple(scale.shape) != wanted or scale.dtype != format.scale_dtype:
        raise LayoutError(
            f"dequantize: scale: expected {list(wanted)} {format.scale_dtype}, got "
            f"{list(scale.shape)} {scale.dtype}. Pass logical scales, without padding."
        )
    if not format.has_global_amax:
        return
    if global_amax is None or global_amax.numel() != shape[0]:
        got = "None" if global_amax is None else str(list(global_amax.shape))
        raise LayoutError(
            f"dequantize: {format.name} needs global_amax [{shape[0]}], got {got}. Pass the amax "
            "of every expert, which quantize returns."
        )


@lru_cache(maxsize=_KEPT)
def _bind(
    name: str,
    direction: Direction,
    shape: tuple[int, int, int],
    _strides: Any,
    _aligned: Any,
    _device: torch.device,
) -> BoundKernel:
    """Return the kernel for buffers of one shape; what it is compiled for is in the key."""
    from moe_optim.kernels.dequantize_kernel import dequantize_kernel

    format = get_format(name)
    experts, rows, cols = shape
    transposed = format.transposes(direction)
    block_rows, block_cols = format.block(direction)
    tile = DEQUANTIZE_TRANSPOSED if transposed else DEQUANTIZE[format.elements_per_byte]
    tile_rows = tile.rows or block_rows
    return BoundKernel(
        dequantize_kernel,
        experts * -(-rows // tile_rows) * -(-cols // tile.cols),
        ELEMENT=format.element,
        SCALE=format.scale_encoding,
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        TRANSPOSED=transposed,
        TILE_ROWS=tile_rows,
        TILE_COLS=tile.cols,
        num_warps=tile.num_warps,
    )
