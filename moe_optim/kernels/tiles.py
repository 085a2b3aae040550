# mypy: allow-incomplete-defs

"""Triton helpers that read descriptors, mask owned elements and zero gaps."""

import triton
import triton.language as tl

from moe_optim.kernels import fields
from moe_optim.kernels.tuning import GAP_TILE as _GAP_TILE

GAP_TILE = tl.constexpr(_GAP_TILE)
FIELDS = tl.constexpr(fields.DESCRIPTOR_FIELDS)
SOURCE = tl.constexpr(fields.SOURCE)
ROWWISE_DATA = tl.constexpr(fields.ROWWISE_DATA)
ROWWISE_SCALE = tl.constexpr(fields.ROWWISE_SCALE)
COLUMNWISE_DATA = tl.constexpr(fields.COLUMNWISE_DATA)
COLUMNWISE_SCALE = tl.constexpr(fields.COLUMNWISE_SCALE)
ROWS = tl.constexpr(fields.ROWS)
COLS = tl.constexpr(fields.COLS)
STRIDES = tl.constexpr(fields.STRIDES)
BEGIN = tl.constexpr(fields.BEGIN)
END = tl.constexpr(fields.END)
AMAX_SLOT = tl.constexpr(fields.AMAX_SLOT)
GLOBAL_AMAX = tl.constexpr(fields.GLOBAL_AMAX)


@triton.jit
def buffer_rows(member, buffer: tl.constexpr, row, dtype: tl.constexpr, alignment: tl.constexpr):
    """Return a pointer to the start of ``row`` (int64) of a buffer, and its row stride in elements.

    ``member`` points to a descriptor, ``buffer`` is the column of the buffer's address, and both
    results are hinted to be multiples of ``alignment`` elements.
    """
    memory = tl.load(member + buffer).to(tl.pointer_type(dtype))
    stride = tl.multiple_of(tl.load(member + STRIDES + buffer).to(tl.int32), alignment)
    return tl.multiple_of(memory, alignment) + row * stride, stride


@triton.jit
def is_owned(member, first_row, first_col, rows, columns, cols):
    """Return the mask of tile elements in the member's owned range.

    ``first_row`` is int64. ``rows`` and ``columns`` are int32 offsets in the tile that broadcast.
    """
    first = first_row * cols + first_col
    limit: tl.constexpr = (1 << 31) - 1
    begin = tl.minimum(tl.maximum(tl.load(member + BEGIN) - first, 0), limit).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(member + END) - first, 0), limit).to(tl.int32)
    place = rows * cols + columns
    return (place >= begin) & (place < end)


@triton.jit
def zero_gap(gap, first):
    """Zero up to GAP_TILE two-byte units of a gap, starting at unit ``first``."""
    memory = tl.load(gap).to(tl.pointer_type(tl.int16))
    left = tl.load(gap + 1).to(tl.int32) - first
    units = tl.arange(0, GAP_TILE)
    tl.store(memory + first + units, tl.zeros((GAP_TILE,), dtype=tl.int16), mask=units < left)
