"""Dequantization: the exact fp32 definition, and a fast path to bf16."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import (
    BlockScaledFormat,
    Direction,
    Element,
    QuantizedWeight,
    get_format,
)
from moe_optim.formats.reference.blocks import CHUNK_NUMEL, transpose_into
from moe_optim.formats.reference.codes import decode, decode_e4m3, decode_e8m0
from moe_optim.formats.reference.scales import decoding_amax
from moe_optim.library import in_graphs, operation

_NVFP4_UNIT = 1.0 / (6.0 * 448.0)


def dequantize(q: QuantizedWeight, direction: Direction = "rowwise") -> Tensor:
    """Return the values of the buffers of ``direction``.

    Exact for INT4, and for scales that are powers of two, except that magnitudes of 2^128 and above
    give Inf: MXFP8 weights round up to it from 2^128 - 2^123, MXFP4 weights from 2^128 - 2^125.
    Products with fp32 scales are rounded to fp32. NVFP4 values are ``element * ((block scale
    * global amax) * fl(1/2688))``, each product rounded to fp32, as in TE. An amax below 2688 /
    FLT_MAX, 1.3 * 2^-117, counts as that value, as when encoding; TE dequantizes such experts to
    smaller values.

    Args:
        q: buffers; not modified.
        direction: direction to read.

    Returns:
        [E, R, C] fp32, contiguous, even if the data buffer is stored transposed.
    """
    data, scale = q.data(direction), q.scale(direction)
    return _reference_dequantize(data, scale, q.global_amax, q.format.name, direction)


def dequantize_bf16(
    data: Tensor,
    scale: Tensor,
    format: BlockScaledFormat,
    direction: Direction = "rowwise",
    *,
    global_amax: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``dequantize(...).bfloat16()``, several times faster.

    Values are equal for all scales that quantization produces, and for all others that bf16
    represents: every E8M0 code, and every fp32 power of two from 2^-133 to 2^127. Where a format
    has powers of two, other fp32 scales are rounded to bf16 first and may differ. NaN stays NaN,
    with unspecified payload and sign.

    Args:
        data: uint8 buffer of ``direction``, as stored: of ``format.data_shape``.
        scale: logical scales, of ``format.scale_shape`` and ``format.scale_dtype``.
        format: format of the buffers.
        direction: direction of the buffers.
        global_amax: [E] fp32, required by formats with a global amax.
        out: [E, R, C] bf16, contiguous; overwritten and returned if given.

    Returns:
        [E, R, C] bf16, contiguous: ``out``, or newly allocated.

    Raises:
        LayoutError: ``global_amax`` is missing, or ``out`` does not have the shape of the weight.
    """
    if torch.compiler.is_compiling():
        values = _dequantize_bf16(data, scale, global_amax, format.name, direction)
        return values if out is None else out.copy_(values)
    stored_shape = (*data.shape[:2], data.shape[2] * format.elements_per_byte)
    transposed = format.transposes(direction)
    shape = values_shape(data, format, direction)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=data.device)
    elif out.shape != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise LayoutError(
            f"dequantize_bf16.out: expected contiguous {list(shape)} torch.bfloat16, got "
            f"{list(out.shape)} {out.dtype} with strides {list(out.stride())}."
        )
    if not out.numel():
        return out
    factors = _scale_values(scale, format, direction, global_amax)
    if format.scale_encoding == "power_of_two":  # same product, and bf16 is faster
        factors = factors.bfloat16()
    values = torch.empty(stored_shape, dtype=out.dtype, device=out.device) if transposed else out
    _decode_into(data, values, format.element)
    _scale_in_place(values, factors, format, direction)
    if transposed:
        transpose_into(out, values)
    return out


def values_shape(
    data: Tensor, format: BlockScaledFormat, direction: Direction
) -> tuple[int, int, int]:
    """Return the logical [E, R, C] of a data buffer."""
    experts, rows, packed_cols = data.shape
    cols = packed_cols * format.elements_per_byte
    return (experts, cols, rows) if format.transposes(direction) else (experts, rows, cols)


def empty_values(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the fake of an operation that begins with data, scale, amaxes, format, direction."""

    def empty(
        data: Tensor, _scale: Tensor, _amax: Tensor | None, format: str, way: Any, *_: Any
    ) -> Tensor:
        return data.new_empty(values_shape(data, get_format(format), way), dtype=dtype)

    return empty


@in_graphs(fake=empty_values(torch.float32))
def _reference_dequantize(
    data: Tensor, scale: Tensor, global_amax: Tensor | None, format: str, direction: str
) -> Tensor:
    known, way = get_format(format), cast(Direction, direction)
    values = decode(known.element, data)
    factors = _scale_values(scale, known, way, global_amax).float()
    values = values * _expand(factors, known, way, values.shape)
    return values.transpose(1, 2).contiguous() if known.transposes(way) else values


@partial(operation, fake=empty_values(torch.bfloat16))
def _dequantize_bf16(
    data: Tensor, scale: Tensor, global_amax: Tensor | None, format: str, direction: str
) -> Tensor:
    way = cast(Direction, direction)
    return dequantize_bf16(data, scale, get_format(format), way, global_amax=global_amax)


def _scale_values(
    scale: Tensor, format: BlockScaledFormat, direction: Direction, global_amax: Tensor | None
) -> Tensor:
    """Return the factors of elements, along the axes of the data buffer as stored.

    E8M0 and bf16 scales give bf16, which is exact; others give fp32.
    """
    if format.columnwise_copy == "shared" and direction == "columnwise":
        scale = scale.transpose(1, 2)  # scales of shared data are stored transposed
    if format.scale_encoding == "e8m0":
        return decode_e8m0(scale)
    if format.scale_encoding != "e4m3":
        return scale
    if global_amax is None:
        raise LayoutError(f"dequantize: {format.name} needs global_amax [{len(scale)}], got None.")
    return (decode_e4m3(scale) * decoding_amax(global_amax).view(-1, 1, 1)) * _NVFP4_UNIT


def _expand(
    scale: Tensor, format: BlockScaledFormat, direction: Direction, shape: torch.Size
) -> Tensor:
    """Repeat each scale over its block, and crop partial edge blocks."""
    block_rows, block_cols = format.block(direction)  # square wherever data is transposed
    scale = scale.repeat_interleave(block_rows, dim=1).repeat_interleave(block_cols, dim=2)
    return scale[:, : shape[1], : shape[2]]


def _scale_in_place(
    values: Tensor, scale: Tensor, format: BlockScaledFormat, direction: Direction
) -> None:
    """Multiply bf16 ``values``, as stored, by the scales of their blocks, rounding once."""
    block_rows, block_cols = format.block(direction)
    experts, rows, cols = values.shape
    if rows % block_rows or cols % block_cols:
        values.mul_(_expand(scale, format, direction, values.shape))
        return
    if block_rows == 1:
        values.view(*scale.shape, block_cols).mul_(scale.unsqueeze(-1))
        return
    lines = scale.repeat_interleave(block_cols, dim=2)  # one factor per column, [E, R/block, C]
    values.view(experts, -1, block_rows, cols).mul_(lines.unsqueeze(2))


def _decode_into(data: Tensor, values: Tensor, element: Element) -> None:
    """Decode every element to contiguous bf16 by table lookup, two bytes at a time if possible."""
    codes = data.reshape(-1)
    wide = codes.numel() % 2 == 0 and codes.storage_offset() % 2 == 0
    codes = codes.view(torch.uint16) if wide else codes
    table = _decode_table(element, wide, data.device)
    flat = values.view(-1).view(table.dtype)
    for start in range(0, len(codes), CHUNK_NUMEL):
        index = codes[start : start + CHUNK_NUMEL].int()
        torch.index_select(table, 0, index, out=flat[start : start + CHUNK_NUMEL])


@cache
def _decode_table(element: Element, wide: bool, device: torch.device) -> Tensor:
    """Return the bits of the bf16 values of every byte, or pair of bytes."""
    codes = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
    if wide:
        pairs = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.uint16)
        codes = pairs.view(torch.uint8)
    decoded = decode(element, codes.unsqueeze(1))
    bits = decoded.bfloat16().flatten()
    width = {1: torch.int16, 2: torch.int32, 4: torch.int64}[
        bits.numel() // (65536 if wide else 256)
    ]
    return bits.view(width).to(device)
