# mypy: allow-incomplete-defs

"""Kernels for fake quantization to row-only formats: the values of bf16 copies, and amaxes."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import (
    amax,
    divide,
    larger_magnitude,
    nvfp4_global_encode,
    power_of_two,
    round_to_bf16,
    round_to_e2m1,
    round_to_int4,
)
from moe_optim.kernels.exchange import AMAX_SLOTS as _AMAX_SLOTS
from moe_optim.kernels.fields import SPAN_FIELDS as _SPAN_FIELDS
from moe_optim.kernels.requantize_rows import encode_row_scale

SPAN_FIELDS = tl.constexpr(_SPAN_FIELDS)
AMAX_SLOTS = tl.constexpr(_AMAX_SLOTS)


@triton.jit
def fake_blocks_kernel(
    spans,  # [num_experts, SPAN_FIELDS] int64, see fields.py
    amaxes,  # [num_experts, AMAX_SLOTS] fp32, or None for formats without a global amax
    result,  # [elements of all experts] bf16
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    DATA_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    FROM_FP32: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write what one tile of one expert is after quantization and dequantization.

    A block is BLOCK elements of a row, and rows are whole blocks, so a tile is a run of blocks::

        value = bf16 of code(w * factor) * scale;  of code(w / factor) * scale for INT4

    with ``w`` rounded to bf16, ``factor`` and the stored ``scale`` of ``encode_row_scale``. NVFP4
    multiplies by ``(scale * amax of the expert) * fl(1 / 2688)``, as ``formats.reference`` does.

    Grid (tiles of the longest expert, num_experts).
    """
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    span = spans + tl.program_id(1).to(tl.int64) * SPAN_FIELDS
    first = tl.program_id(0).to(tl.int64) * TILE
    source, left = _source(span, first, DTYPE, ALIGNED)
    target = result + (tl.load(span + 3) + first)
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    places = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = places < tl.minimum(left, TILE).to(tl.int32)
    weight = round_to_bf16(tl.load(source + places, mask=inside, other=0.0))
    largest, global_encode = 0.0, 1.0
    if SCALE == "e4m3":
        parts = amaxes + tl.program_id(1) * AMAX_SLOTS + tl.arange(0, AMAX_SLOTS)
        largest = tl.max(tl.load(parts), 0)
        global_encode = nvfp4_global_encode(largest)
    stored, factor = encode_row_scale(amax(weight, 1), global_encode, SCALE, DATA_MAX)
    values = _round(weight, factor[:, None], ELEMENT) * _decode(stored, largest, SCALE)[:, None]
    tl.store(target + places, values.to(tl.bfloat16), mask=inside)


@triton.jit
def span_amax_kernel(
    spans,  # [num_experts, SPAN_FIELDS] int64, see fields.py
    amaxes,  # [num_experts, AMAX_SLOTS] fp32
    FROM_FP32: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the amax of every AMAX_SLOTS-th tile of an expert; grid (AMAX_SLOTS, num_experts)."""
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    span = spans + tl.program_id(1).to(tl.int64) * SPAN_FIELDS
    source, left = _source(span, tl.program_id(0).to(tl.int64) * TILE, DTYPE, ALIGNED)
    largest = tl.zeros((TILE,), dtype=tl.float32)
    places = tl.arange(0, TILE)
    for start in tl.range(0, left, AMAX_SLOTS * TILE, loop_unroll_factor=4):
        inside = places < tl.minimum(left - start, TILE).to(tl.int32)
        values = tl.load(source + start + places, mask=inside, other=0.0)
        largest = larger_magnitude(largest, values)
    # Rounding is monotonic: the rounded maximum is the maximum of the rounded values.
    slot = amaxes + tl.program_id(1) * AMAX_SLOTS + tl.program_id(0)
    tl.store(slot, round_to_bf16(tl.max(largest, 0)))


@triton.jit
def _source(span, first, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element ``first`` of an expert, and how many there are from there on.

    Triton loses alignment hints of arguments.
    """
    source = tl.load(span).to(tl.pointer_type(DTYPE))
    numel = tl.load(span + 2)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        numel = tl.multiple_of(numel, 16)
    return source + first, numel - first


@triton.jit
def _round(weight, factor, ELEMENT: tl.constexpr):
    """Return the values of the codes of ``weight``, in units of their scale, fp32."""
    if ELEMENT == "e4m3":
        values = (weight * factor).to(tl.float8e4nv).to(tl.float32)  # the hardware saturates
    elif ELEMENT == "e2m1":
        values = round_to_e2m1(weight * factor)
    else:
        values = round_to_int4(divide(weight, factor))
    return values


@triton.jit
def _decode(stored, global_amax, SCALE: tl.constexpr):
    """Return the fp32 values of stored scales."""
    if SCALE == "e8m0":
        scale = power_of_two(stored.to(tl.int32))
    elif SCALE == "e4m3":
        decoding_amax = tl.maximum(global_amax, 7.899322037525772e-36)  # 2688 * 2^-128
        scale = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32) * decoding_amax
        scale = scale * (1.0 / 2688.0)
    else:
        scale = stored.to(tl.float32)
    return scale
