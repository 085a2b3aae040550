# mypy: allow-incomplete-defs

"""Kernels of the per-tensor cast: amax per part, amax per weight, scale, and codes."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import encode_e4m3, larger_magnitude, round_to_bf16
from moe_optim.kernels.fields import TENSORWISE_FIELDS

PART_FIELDS = tl.constexpr(TENSORWISE_FIELDS)


@triton.jit
def part_amax_kernel(
    parts,  # [num_parts, PART_FIELDS] int64, see fields.py
    slots,  # [num_slots] fp32
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the amax of one part, rounded to bf16, to its slot; NaN counts as zero.

    Grid (num_parts,). Whole tiles are read without masks, in the widest accesses.
    """
    part = parts + tl.program_id(0).to(tl.int64) * PART_FIELDS
    master = _pointer(part, tl.float32, ALIGNED)
    count = tl.load(part + 2).to(tl.int32)
    whole = count - count % TILE
    places = tl.arange(0, TILE)
    largest = tl.zeros((TILE,), dtype=tl.float32)
    for start in tl.range(0, whole, TILE, loop_unroll_factor=4):
        largest = larger_magnitude(largest, tl.load(master + start + places))
    if whole < count:
        places += whole
        values = tl.load(master + places, mask=places < count, other=0.0)
        largest = larger_magnitude(largest, values)
    # Rounding is monotonic: the rounded maximum is the maximum of the rounded values.
    tl.store(slots + tl.load(part + 4), round_to_bf16(tl.max(largest, 0)))


@triton.jit
def weight_amax_kernel(
    bounds,  # [num_weights + 1] int64
    slots,  # [num_slots] fp32
    amaxes,  # [num_weights] fp32
    LANES: tl.constexpr,
):
    """Write the maximum of the slots of one weight, or 0 without slots; grid (num_weights,)."""
    weight = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    end = tl.load(bounds + weight + 1)
    largest = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(tl.load(bounds + weight), end, LANES):
        inside = start + lanes < end
        largest = tl.maximum(largest, tl.load(slots + start + lanes, mask=inside, other=0.0))
    tl.store(amaxes + weight, tl.max(largest, 0))


@triton.jit
def scale_kernel(
    amaxes,  # [num_weights] fp32
    scales,  # [num_weights] fp32
    inverses,  # [num_weights] int64: addresses
):
    """Write the scale of one weight, and its inverse to the weight's ``scale_inv``.

    scale = 448 / amax, at most FLT_MAX; 1 for an amax of 0 or Inf, as in current scaling of
    Transformer Engine 2.20.

    Grid (num_weights,).
    """
    weight = tl.program_id(0)
    amax = tl.load(amaxes + weight)
    scale = tl.minimum(tl.div_rn(448.0, amax), 3.4028234663852886e38)
    scale = tl.where((amax == 0) | (amax == float("inf")), 1.0, scale)
    tl.store(scales + weight, scale)
    inverse = tl.load(inverses + weight).to(tl.pointer_type(tl.float32))
    tl.store(inverse, tl.div_rn(1.0, scale))


@triton.jit
def cast_kernel(
    parts,  # [num_parts, PART_FIELDS] int64, see fields.py
    scales,  # [num_weights] fp32
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the codes of one part: E4M3 of w * scale, w = master rounded to bf16.

    Grid (num_parts,). Whole tiles are read and written without masks, in the widest accesses.
    """
    part = parts + tl.program_id(0).to(tl.int64) * PART_FIELDS
    master = _pointer(part, tl.float32, ALIGNED)
    codes = _pointer(part + 1, tl.uint8, ALIGNED)
    count = tl.load(part + 2).to(tl.int32)
    scale = tl.load(scales + tl.load(part + 3))
    whole = count - count % TILE
    places = tl.arange(0, TILE)
    for start in tl.range(0, whole, TILE, loop_unroll_factor=2):
        values = tl.load(master + start + places)
        tl.store(codes + start + places, encode_e4m3(round_to_bf16(values) * scale))
    if whole < count:
        places += whole
        inside = places < count
        values = tl.load(master + places, mask=inside, other=0.0)
        tl.store(codes + places, encode_e4m3(round_to_bf16(values) * scale), mask=inside)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the pointer stored at an address."""
    memory = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
    return memory
