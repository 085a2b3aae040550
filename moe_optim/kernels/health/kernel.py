# mypy: allow-incomplete-defs

"""One pass over masters and rowwise planes, which adds up what ``moe_optim.health`` names."""

import triton
import triton.language as tl

from moe_optim.health import NUM_SUMS as _NUM_SUMS
from moe_optim.health import SKETCH as _SKETCH
from moe_optim.health import Sum
from moe_optim.kernels.encode import amax, power_of_two, round_to_bf16
from moe_optim.kernels.tiles import (
    AMAX_SLOT,
    BEGIN,
    COLS,
    END,
    FIELDS,
    GLOBAL_AMAX,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    SOURCE,
    is_owned,
    plane_rows,
)

NUM_SUMS = tl.constexpr(_NUM_SUMS)
SKETCH = tl.constexpr(_SKETCH)
SQUARES = tl.constexpr(int(Sum.SQUARES))
ERRORS = tl.constexpr(int(Sum.ERRORS))
ELEMENTS = tl.constexpr(int(Sum.ELEMENTS))
SATURATED = tl.constexpr(int(Sum.SATURATED))
FLUSHED = tl.constexpr(int(Sum.FLUSHED))
BLOCKS = tl.constexpr(int(Sum.BLOCKS))
DEAD = tl.constexpr(int(Sum.DEAD))
FIRST_LANE = tl.constexpr(len(Sum))


@triton.jit
def measure_kernel(
    descriptors,  # [num_members, FIELDS] int64, see HealthLaunch
    tiles,  # [num_programs, 4] int32: descriptor, first row, first column, 0
    sums,  # [rows, NUM_SUMS] fp64
    amaxes,  # [rows] int32: bits of fp32, which are in the order of magnitudes
    FORMAT: tl.constexpr,
    BAND: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    FROM_FP32: tl.constexpr,
):
    """Measure what is owned of [PROGRAM_ROWS, TILE_COLS] of an expert, and add it to its sums.

    Grid (num_programs,). Counts are whole numbers and maxima exact, in whatever order programs add
    them; the last bits of the other sums depend on it.
    """
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    SCALE: tl.constexpr = tl.float32 if FORMAT == "fp8_block" else tl.uint8
    STRIP: tl.constexpr = 32 if BAND > 32 else BAND  # rows at a time
    PER_ROW: tl.constexpr = TILE_COLS // WIDTH  # blocks
    UNIT: tl.constexpr = 1.75 if FORMAT == "nvfp4" else 1.0  # of what is compared with limits

    tile = tiles + 4 * tl.program_id(0).to(tl.int64)
    member = descriptors + tl.load(tile).to(tl.int64) * FIELDS
    first_row = tl.load(tile + 1)
    first_col = tl.load(tile + 2)
    cols = tl.load(member + COLS).to(tl.int32)
    source = tl.load(member + SOURCE).to(tl.pointer_type(DTYPE))
    global_amax = 1.0
    if FORMAT == "nvfp4":
        global_amax = tl.load(tl.load(member + GLOBAL_AMAX).to(tl.pointer_type(tl.float32)))
    end_row = tl.minimum(first_row + PROGRAM_ROWS, tl.load(member + ROWS).to(tl.int32))
    end_row = tl.minimum(end_row, tl.cdiv(tl.load(member + END), cols).to(tl.int32))
    begin_row = (tl.load(member + BEGIN) // cols).to(tl.int32) // BAND * BAND
    begin_row = tl.maximum(first_row, begin_row)
    height = tl.load(member + ROWS).to(tl.int32)

    rows = tl.arange(0, STRIP)[:, None]
    columns = tl.arange(0, TILE_COLS)[None, :]
    blocks = tl.arange(0, PER_ROW)
    column_inside = columns < cols - first_col
    block_inside = blocks * WIDTH < cols - first_col
    squares = tl.zeros((), dtype=tl.float64)
    errors = squares
    elements = tl.zeros((), dtype=tl.int32)
    saturated = elements
    flushed = elements
    num_blocks = elements
    dead = elements
    largest = tl.zeros((), dtype=tl.float32)
    lanes = tl.zeros((SKETCH,), dtype=tl.float64)

    for offset in range(0, end_row - begin_row, BAND):
        band_row = begin_row + offset
        is_alive = tl.zeros((PER_ROW,), dtype=tl.int32)
        for below in tl.static_range(0, BAND, STRIP):
            row = (band_row + below).to(tl.int64)
            inside = (rows < height - band_row - below) & column_inside
            owned = inside & is_owned(member, row, first_col, rows, columns, cols)
            place = rows * cols + first_col + columns
            weight = tl.load(source + row * cols + place, mask=owned, other=0.0).to(tl.float32)
            weight = round_to_bf16(weight)
            element = _load_elements(member, row, first_col, rows, inside, FORMAT, STRIP, TILE_COLS)
            scale, stride = plane_rows(member, ROWWISE_SCALE, row // HEIGHT, SCALE, 1)
            if HEIGHT == 1:
                places = rows * stride + first_col // WIDTH + blocks[None, :]
                there = (rows < height - band_row - below) & block_inside[None, :]
            else:
                places = first_col // WIDTH + blocks[None, :]
                there = block_inside[None, :]
            factor, limit = _decode_scale(
                tl.load(scale + places, mask=there, other=0), global_amax, FORMAT
            )
            value = tl.reshape(element, (STRIP, PER_ROW, WIDTH)) * factor[:, :, None]
            limits = tl.broadcast_to(limit[:, :, None], (STRIP, PER_ROW, WIDTH))
            limits = tl.reshape(limits, (STRIP, TILE_COLS))
            value = tl.reshape(value, (STRIP, TILE_COLS))

            magnitude = tl.abs(weight)
            above = (magnitude * UNIT > limits) & (value != 0.0) & owned
            zeroed = (weight != 0.0) & (value == 0.0) & owned
            wide = weight.to(tl.float64)
            error = tl.where(owned, value.to(tl.float64) - wide, 0.0)
            squares += _total(wide * wide)
            errors += _total(error * error)
            elements += _total(owned.to(tl.int32))
            saturated += _total(above.to(tl.int32))
            flushed += _total(zeroed.to(tl.int32))
            largest = tl.maximum(largest, amax(amax(weight, 1), 0))

            number = (row * cols).to(tl.uint32) + place.to(tl.uint32)
            signed = tl.where(_is_negative(number), -weight, weight)
            per_lane = tl.reshape(signed, (STRIP * TILE_COLS // SKETCH, SKETCH))
            lanes += tl.sum(per_lane.to(tl.float64), 0)

            nonzero = tl.reshape(((value != 0.0) & inside).to(tl.int32), (STRIP, PER_ROW, WIDTH))
            nonzero = tl.max(nonzero, 2)
            if HEIGHT == 1:
                mine = there & is_owned(member, row, first_col, rows, blocks[None, :] * WIDTH, cols)
                num_blocks += _total(mine.to(tl.int32))
                dead += _total((mine & (nonzero == 0)).to(tl.int32))
            else:
                is_alive = tl.maximum(is_alive, tl.max(nonzero, 0))
        if HEIGHT > 1:
            mine = is_owned(member, band_row.to(tl.int64), first_col, 0, blocks * WIDTH, cols)
            mine &= block_inside
            num_blocks += tl.sum(mine.to(tl.int32), 0)
            dead += tl.sum((mine & (is_alive == 0)).to(tl.int32), 0)

    target = tl.load(member + AMAX_SLOT)
    tl.atomic_max(amaxes + target, largest.to(tl.int32, bitcast=True))
    sums += target * NUM_SUMS
    tl.atomic_add(sums + SQUARES, squares)
    tl.atomic_add(sums + ERRORS, errors)
    tl.atomic_add(sums + ELEMENTS, elements.to(tl.float64))
    tl.atomic_add(sums + SATURATED, saturated.to(tl.float64))
    tl.atomic_add(sums + FLUSHED, flushed.to(tl.float64))
    tl.atomic_add(sums + BLOCKS, num_blocks.to(tl.float64))
    tl.atomic_add(sums + DEAD, dead.to(tl.float64))
    tl.atomic_add(sums + FIRST_LANE + tl.arange(0, SKETCH), lanes)


@triton.jit
def _total(values):
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit
def _is_negative(number):
    """Return whether ``moe_optim.health.signs`` has -1 for elements of these numbers, uint32."""
    bits = number * 0x9E3779B1
    bits = (bits ^ (bits >> 15)) * 0x85EBCA77
    return (bits >> 31) != 0


@triton.jit
def _load_elements(
    member, row, first_col, rows, inside, FORMAT: tl.constexpr, STRIP: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Return the rowwise elements of a strip in fp32, before they are scaled; zeros outside."""
    data, stride = plane_rows(member, ROWWISE_DATA, row, tl.uint8, 1)
    if FORMAT == "nvfp4":
        pairs = tl.arange(0, TILE_COLS // 2)[None, :]
        cols = tl.load(member + COLS).to(tl.int32)
        height = (tl.load(member + ROWS) - row).to(tl.int32)
        there = (rows < height) & (2 * pairs < cols - first_col)
        packed = tl.load(data + rows * stride + first_col // 2 + pairs, mask=there, other=0)
        packed = packed.to(tl.int32)
        codes = tl.reshape(tl.join(packed & 15, packed >> 4), (STRIP, TILE_COLS))
        power = (codes >> 1) & 3
        magnitude = tl.where(
            power == 0, 0.5 * (codes & 1).to(tl.float32),
            (2 + (codes & 1)).to(tl.float32) * power_of_two(power + 125),
        )  # fmt: skip
        return tl.where(codes >= 8, -magnitude, magnitude)
    columns = tl.arange(0, TILE_COLS)[None, :]
    codes = tl.load(data + rows * stride + first_col + columns, mask=inside, other=0)
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _decode_scale(stored, global_amax, FORMAT: tl.constexpr):
    """Return what elements are multiplied by, and what magnitudes are compared with, both fp32.

    As ``moe_optim.reference`` has them: all products are rounded alike there and here.
    """
    if FORMAT == "nvfp4":
        scale = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        factor = (scale * global_amax) * (1.0 / 2688.0)
        limit = (scale * (1.0 / 256.0)) * global_amax
    elif FORMAT == "fp8_block":
        factor = stored
        limit = factor * 448.0
    else:
        factor = power_of_two(stored.to(tl.int32))
        limit = factor * 448.0
    return factor, limit
