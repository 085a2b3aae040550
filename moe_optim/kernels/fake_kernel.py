# mypy: allow-incomplete-defs

"""Kernels for fake quantization and its clipped gradient."""

import triton
import triton.language as tl

from moe_optim.kernels.fields import SPAN_FIELDS as _SPAN_FIELDS

SPAN_FIELDS = tl.constexpr(_SPAN_FIELDS)
ZERO_AMAX = tl.constexpr(2.0**-24)


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["amaxes"])
def fake_quantize_kernel(
    spans,  # [num_experts, SPAN_FIELDS] int64, see fields.py
    amaxes,  # [num_experts], or [1] for all of them; fp32, bf16 or fp16
    step,  # stride of amaxes: 1, or 0
    result,  # [elements of all experts], of the dtype of the values
    smallest,  # code, fp32
    largest,
    E4M3: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fake-quantize one tile of one expert.

    ::

        integers  scale = largest / amax;    clamp(round(w * scale), smallest, largest) / scale
        E4M3      scale = (1 / amax) * 448;  E4M3(w * scale) * (1 / scale)

    Matches NVIDIA ModelOpt 0.47 (tensor_quant.py).

    Grid (tiles of the longest expert, num_experts).
    """
    DTYPE: tl.constexpr = result.dtype.element_ty
    span, first, inside = _tile(spans, ALIGNED, TILE)
    amax = tl.load(amaxes + step * tl.program_id(1)).to(tl.float32)
    places = tl.arange(0, TILE)
    source = _source(span, DTYPE, first, ALIGNED)
    values = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
    if E4M3:
        scale = tl.div_rn(1.0, tl.where(amax <= ZERO_AMAX, 1.0, amax)) * largest
        codes = (values * scale).to(tl.float8e4nv)  # the hardware saturates
        values = codes.to(tl.float32) * tl.div_rn(1.0, scale)
    else:
        scale = tl.where(amax <= ZERO_AMAX, 0.0, tl.div_rn(largest, amax))
        codes = _round(_clamp(values * scale, smallest, largest))
        values = tl.div_rn(codes, tl.where(amax <= ZERO_AMAX, 1.0, scale))
    target = _target(result, span, first, ALIGNED)
    tl.store(target + places, values.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["amaxes"])
def clip_gradient_kernel(
    spans,  # [num_experts, SPAN_FIELDS] int64, see fields.py
    amaxes,  # [num_experts], or [1] for all of them; fp32, bf16 or fp16
    step,  # stride of amaxes: 1, or 0
    result,  # [elements of all experts], of the dtype of values and gradients
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradients of one tile of one expert, zero where a magnitude exceeds the amax.

    Grid (tiles of the longest expert, num_experts).
    """
    DTYPE: tl.constexpr = result.dtype.element_ty
    span, first, inside = _tile(spans, ALIGNED, TILE)
    amax = tl.load(amaxes + step * tl.program_id(1)).to(tl.float32)
    places = tl.arange(0, TILE)
    source = _source(span, DTYPE, first, ALIGNED)
    values = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
    source = _source(span + 1, DTYPE, first, ALIGNED)
    gradients = tl.load(source + places, mask=inside, other=0.0)
    kept = tl.where(tl.abs(values) <= amax, gradients, tl.zeros_like(gradients))
    target = _target(result, span, first, ALIGNED)
    tl.store(target + places, kept, mask=inside)


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["amaxes", "like"])
def zero_clipped_kernel(
    spans,  # [num_experts, SPAN_FIELDS] int64, see fields.py
    amaxes,  # [num_experts], or [1] for all of them; fp32, bf16 or fp16
    step,  # stride of amaxes: 1, or 0
    like,  # tensor of the gradients' dtype, not read; values are bf16
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Zero the gradients of one tile of one expert where a magnitude exceeds the amax.

    Reads values only, and writes few gradients, since few values are clipped.

    Grid (tiles of the longest expert, num_experts).
    """
    DTYPE: tl.constexpr = like.dtype.element_ty
    span, first, inside = _tile(spans, ALIGNED, TILE)
    amax = tl.load(amaxes + step * tl.program_id(1)).to(tl.float32)
    places = tl.arange(0, TILE)
    source = _source(span, tl.bfloat16, first, ALIGNED)
    values = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
    clipped = (tl.abs(values) <= amax) == 0  # NaN, too
    target = _source(span + 1, DTYPE, first, ALIGNED)
    tl.store(target + places, tl.zeros((TILE,), dtype=DTYPE), mask=inside & clipped)


@triton.jit
def _tile(spans, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Return a program's span, the first element of its tile, and the mask of valid elements."""
    span = spans + tl.program_id(1).to(tl.int64) * SPAN_FIELDS
    first = tl.program_id(0).to(tl.int64) * TILE
    numel = tl.load(span + 2)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    left = tl.minimum(numel - first, TILE).to(tl.int32)
    return span, first, tl.arange(0, TILE) < left


@triton.jit
def _source(address, DTYPE: tl.constexpr, first, ALIGNED: tl.constexpr):
    """Return a pointer to element ``first``, a multiple of the tile, of the tensor at ``address``.

    Triton keeps an alignment hint where a value is computed, but loses it on arguments.
    """
    memory = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
    return memory + first


@triton.jit
def _target(result, span, first, ALIGNED: tl.constexpr):
    place = result + (tl.load(span + 3) + first)
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def _clamp(value, low, high):
    """Clamp a value; NaN propagates."""
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _round(value):
    """Round fp32 magnitudes below 2^22 to the nearest integer, ties to even; -0.3 gives -0.0."""
    # Adding 1.5 * 2^23 rounds. The caller clamps first: the bounds are integers, so the result is
    # the same, and the clamp keeps the multiplication from being fused into an FMA.
    ONE_AND_A_HALF: tl.constexpr = 12582912.0
    rounded = (value + ONE_AND_A_HALF) - ONE_AND_A_HALF
    sign = value.to(tl.int32, bitcast=True) & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
