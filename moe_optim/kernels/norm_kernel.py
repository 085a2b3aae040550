# mypy: allow-incomplete-defs

"""Kernels that sum squares and count zeros of gradients: per part, then per group."""

import triton
import triton.language as tl

from moe_optim.kernels.fields import NORM_FIELDS

PART_FIELDS = tl.constexpr(NORM_FIELDS)


@triton.jit
def sum_squares_kernel(
    parts,  # [num_parts, PART_FIELDS] int64: address, first and end element, slot
    sums,  # [num_slots] fp64
    zero_sums,  # [num_slots] int32
    FROM_FP32: tl.constexpr,
    COUNT_ZEROS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the fp64 sum of squares of one part to its slot, and its number of zeros.

    The norm of a group is sqrt(sum of g^2); a square of fp32 is exact in fp64.

    Grid (num_parts,). Whole tiles are read without masks, in the widest accesses.
    """
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    part = parts + tl.program_id(0).to(tl.int64) * PART_FIELDS
    source = tl.multiple_of(tl.load(part).to(tl.pointer_type(DTYPE)), 16)
    begin = tl.load(part + 1).to(tl.int32)
    end = tl.load(part + 2).to(tl.int32)
    first_whole = tl.cdiv(begin, TILE) * TILE
    end_whole = end // TILE * TILE

    places = tl.arange(0, TILE)
    squares = tl.zeros((TILE,), dtype=tl.float64)
    zeros = tl.zeros((TILE,), dtype=tl.int32)
    for start in range(first_whole, end_whole, TILE):
        values = tl.load(source + start + places)
        squares, zeros = _add(squares, zeros, values, True, COUNT_ZEROS)
    if begin > 0:
        inside = (places >= begin) & (places < end)
        values = tl.load(source + places, mask=inside, other=0.0)
        squares, zeros = _add(squares, zeros, values, inside, COUNT_ZEROS)
    if (end_whole < end) & (end_whole >= first_whole):
        inside = places < end - end_whole
        values = tl.load(source + end_whole + places, mask=inside, other=0.0)
        squares, zeros = _add(squares, zeros, values, inside, COUNT_ZEROS)

    slot = tl.load(part + 3)
    tl.store(sums + slot, tl.sum(squares, 0))
    if COUNT_ZEROS:
        tl.store(zero_sums + slot, tl.sum(zeros, 0))


@triton.jit
def _add(squares, zeros, values, inside, COUNT_ZEROS: tl.constexpr):
    """Add a tile to both running sums; masked-out values do not count as zeros."""
    values = values.to(tl.float32)
    wide = values.to(tl.float64)
    if COUNT_ZEROS:
        zeros += ((values == 0.0) & inside).to(tl.int32)
    return squares + wide * wide, zeros  # exact squares: FMA or not, same bits


@triton.jit
def add_sums_kernel(
    bounds,  # [num_groups + 1] int64
    sums,  # [num_slots] fp64
    zero_sums,  # [num_slots] int32
    squares,  # [num_groups] fp64
    zeros,  # [1] int64
    COUNT_ZEROS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add up the slots of one group, and in program 0 the zeros of all; grid (num_groups,)."""
    group = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    end = tl.load(bounds + group + 1)
    total = tl.zeros((LANES,), dtype=tl.float64)
    for start in range(tl.load(bounds + group), end, LANES):
        total += tl.load(sums + start + lanes, mask=start + lanes < end, other=0.0)
    tl.store(squares + group, tl.sum(total, 0))
    if COUNT_ZEROS and group == 0:
        num_slots = tl.load(bounds + tl.num_programs(0))
        count = tl.zeros((LANES,), dtype=tl.int64)
        for start in range(0, num_slots, LANES):
            mask = start + lanes < num_slots
            count += tl.load(zero_sums + start + lanes, mask=mask, other=0).to(tl.int64)
        tl.store(zeros, tl.sum(count, 0))
