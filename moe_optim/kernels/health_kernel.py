# mypy: allow-incomplete-defs

"""Kernels that compute the sums of ``formats/health_figures.py`` in one pass over the weights."""

import triton
import triton.language as tl

from moe_optim.formats.health_figures import NUM_SUMS as _NUM_SUMS
from moe_optim.formats.health_figures import SKETCH as _SKETCH
from moe_optim.formats.health_figures import Sum
from moe_optim.kernels.encode import amax, power_of_two
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
    buffer_rows,
    is_owned,
)

NUM_SUMS = tl.constexpr(_NUM_SUMS)
SKETCH = tl.constexpr(_SKETCH)
SQUARES = tl.constexpr(int(Sum.SQUARES))
ERRORS = tl.constexpr(int(Sum.ERRORS))
SATURATED = tl.constexpr(int(Sum.SATURATED))
FLUSHED = tl.constexpr(int(Sum.FLUSHED))
DEAD = tl.constexpr(int(Sum.DEAD))
FIRST_LANE = tl.constexpr(len(Sum))
QUAD = tl.constexpr(4)  # adjacent columns per thread
FIRST_FACTOR = tl.constexpr(0x9E3779B1)  # both as in ``health_figures.signs``
SECOND_FACTOR = tl.constexpr(0x85EBCA77)


@triton.jit
def measure_kernel(
    descriptors,  # [num_members, FIELDS] int64, see fields.py
    tiles,  # [num_programs, 4] int32: descriptor, first row, first column, part
    parts,  # [num_parts, NUM_SUMS] fp64
    amaxes,  # [rows] int32: bits of nonnegative fp32, which order like their values
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    DATA_MAX: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    HELD_ROWS: tl.constexpr,
    FROM_FP32: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Measure the owned elements of [PROGRAM_ROWS, TILE_COLS] of an expert into one part.

    With w the weight in bf16 and q its quantized value, a part holds the sums of w^2, (q - w)^2 and
    sign * w (the sketch), and counts of saturated and flushed weights and of dead blocks.

    Grid (num_programs,). WHOLE tiles are entirely valid and owned, with aligned quads. Registers
    hold one set of sums per column until the last row.
    """
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    GROUP: tl.constexpr = HEIGHT if HEIGHT > 32 else 32  # rows per check of blocks
    BITS: tl.constexpr = GROUP // HEIGHT  # blocks per group, vertically
    PER_ROW: tl.constexpr = TILE_COLS // WIDTH  # blocks per row
    QUADS: tl.constexpr = TILE_COLS // QUAD
    UNIT: tl.constexpr = 1.75 if SCALE == "e4m3" else 1.0  # factor of compared magnitudes

    tile = tiles + 4 * tl.program_id(0).to(tl.int64)
    member = descriptors + tl.load(tile).to(tl.int64) * FIELDS
    first_row = tl.load(tile + 1)
    first_col = tl.multiple_of(tl.load(tile + 2), TILE_COLS)
    cols = tl.load(member + COLS).to(tl.int32)
    source = tl.load(member + SOURCE).to(tl.pointer_type(DTYPE))
    if WHOLE:
        cols = tl.multiple_of(cols, QUAD)
        source = tl.multiple_of(source, QUAD * DTYPE.primitive_bitwidth // 8)
    global_amax = 1.0
    if SCALE == "e4m3":
        global_amax = tl.load(tl.load(member + GLOBAL_AMAX).to(tl.pointer_type(tl.float32)))
    begin_row = first_row
    end_row = first_row + PROGRAM_ROWS
    if not WHOLE:
        begin_row = (tl.load(member + BEGIN) // cols).to(tl.int32) // GROUP * GROUP
        begin_row = tl.maximum(first_row, begin_row)
        end_row = tl.minimum(end_row, tl.cdiv(tl.load(member + END), cols).to(tl.int32))

    rows = tl.arange(0, HELD_ROWS)[:, None]
    columns = tl.arange(0, TILE_COLS)[None, :]
    blocks = tl.arange(0, PER_ROW)[None, :]
    numbers = tl.arange(0, BITS)[:, None]
    hashes = columns.to(tl.uint32) * FIRST_FACTOR
    squares = tl.zeros((TILE_COLS,), dtype=tl.float64)
    errors = squares
    lanes = squares
    largest = tl.zeros((TILE_COLS,), dtype=tl.float32)
    counts = tl.zeros((TILE_COLS,), dtype=tl.int32)  # saturated; flushed from bit 16
    dead = tl.zeros((BITS, PER_ROW), dtype=tl.int32)

    for group_row in range(begin_row, end_row, GROUP):
        alive = tl.zeros((QUADS,), dtype=tl.int32)  # one bit per block of the group
        for below in range(0, GROUP, HELD_ROWS):
            row = tl.cast(group_row + below, tl.int64)
            first = row * cols + first_col
            places = rows * cols + columns
            value, limit = _load_values(
                member, row, first_col, rows, global_amax, ELEMENT, SCALE, DATA_MAX, HEIGHT, WIDTH,
                TILE_COLS, HELD_ROWS, WHOLE,
            )  # fmt: skip
            bits = tl.reshape(value.to(tl.int32, bitcast=True), (HELD_ROWS, QUADS, QUAD))
            is_alive = (tl.reduce(bits, 2, _or) & 0x7FFFFFFF) != 0
            alive |= tl.reduce(tl.where(is_alive, 1 << (below + rows) // HEIGHT, 0), 0, _or)
            if WHOLE:
                weight = tl.load(source + first + places)
            else:
                owned = is_owned(member, row, first_col, rows, columns, cols)
                owned &= columns < cols - first_col
                weight = tl.load(source + first + places, mask=owned, other=0.0)
                value = tl.where(owned, value, 0.0)
            weight = _round_to_bf16(weight)
            magnitude = tl.abs(weight)
            largest = tl.maximum(largest, tl.max(magnitude, 0))
            flushed = tl.where(weight != 0.0, 1 << 16, 0)
            above = tl.where(magnitude * UNIT > limit, 1, 0)
            counts += tl.sum(tl.where(value == 0.0, flushed, above), 0)
            wide = weight.to(tl.float64)
            error = value.to(tl.float64) - wide
            squares += tl.sum(wide * wide, 0)
            errors += tl.sum(error * error, 0)
            hashed = (first.to(tl.uint32) + (rows * cols).to(tl.uint32)) * FIRST_FACTOR + hashes
            lanes += tl.sum(_signed(wide, hashed), 0)
        words = tl.reduce(tl.reshape(alive, (PER_ROW, WIDTH // QUAD)), 1, _or)[None, :]
        is_dead = ((words >> numbers) & 1) == 0
        if not WHOLE:
            top = tl.cast(group_row, tl.int64)
            is_dead &= is_owned(member, top, first_col, numbers * HEIGHT, blocks * WIDTH, cols)
            is_dead &= blocks * WIDTH < cols - first_col
        dead += is_dead.to(tl.int32)

    target = tl.load(member + AMAX_SLOT)
    tl.atomic_max(amaxes + target, amax(largest, 0).to(tl.int32, bitcast=True))
    part = parts + tl.load(tile + 3).to(tl.int64) * NUM_SUMS
    tl.store(part + SQUARES, tl.sum(squares, 0))
    tl.store(part + ERRORS, tl.sum(errors, 0))
    tl.store(part + SATURATED, tl.sum(counts & 0xFFFF, 0).to(tl.float64))
    tl.store(part + FLUSHED, tl.sum(counts >> 16, 0).to(tl.float64))
    tl.store(part + DEAD, tl.sum(tl.sum(dead, 1), 0).to(tl.float64))
    lanes = tl.sum(tl.reshape(lanes, (TILE_COLS // SKETCH, SKETCH)), 0)
    tl.store(part + FIRST_LANE + tl.arange(0, SKETCH), lanes)


@triton.jit
def add_parts_kernel(
    descriptors,  # [num_members, FIELDS] int64
    bounds,  # [num_members + 1] int64: bounds of the parts of each member
    parts,  # [num_parts, NUM_SUMS] fp64
    sums,  # [rows, NUM_SUMS] fp64
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the parts of one expert to its sums, in a fixed order; grid (num_members,)."""
    member = tl.program_id(0).to(tl.int64)
    end = tl.load(bounds + member + 1)
    lanes = tl.arange(0, LANES)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((LANES, COLUMNS), dtype=tl.float64)
    for start in range(tl.load(bounds + member), end, LANES):
        there = (start + lanes < end) & (columns < NUM_SUMS)
        total += tl.load(parts + (start + lanes) * NUM_SUMS + columns, mask=there, other=0.0)
    columns = tl.arange(0, COLUMNS)
    row = tl.load(descriptors + member * FIELDS + AMAX_SLOT)
    tl.atomic_add(  # each expert has one member per rank, so this adds to zeros
        sums + row * NUM_SUMS + columns, tl.sum(total, 0), mask=columns < NUM_SUMS
    )


@triton.jit
def _round_to_bf16(value):
    """Round as ``encode.round_to_bf16``, but keep the compiler from taking magnitudes in bf16."""
    bits = value.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _signed(wide, hashed):
    """Return fp64 values times their signs, from uint32 indices times FIRST_FACTOR."""
    bits = (hashed ^ (hashed >> 15)) * SECOND_FACTOR & 0x80000000
    return (wide.to(tl.uint64, bitcast=True) ^ (bits.to(tl.uint64) << 32)).to(
        tl.float64, bitcast=True
    )


@triton.jit
def _load_values(
    member, row, first_col, rows, global_amax, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    DATA_MAX: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE_COLS: tl.constexpr,
    HELD_ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return fp32 values, zero outside the weight, and the limits of their magnitudes.

    Both are [HELD_ROWS, TILE_COLS]. The rows belong to one block, or HEIGHT is 1.
    """
    IS_BYTE: tl.constexpr = SCALE == "e8m0" or SCALE == "e4m3"
    WIDE: tl.constexpr = tl.bfloat16 if SCALE == "bf16" else tl.float32
    SCALE_DTYPE: tl.constexpr = tl.uint8 if IS_BYTE else WIDE
    QUADS: tl.constexpr = TILE_COLS // QUAD
    PACKED: tl.constexpr = 1 if ELEMENT == "e4m3" else 2  # elements per byte
    ALIGNMENT: tl.constexpr = QUAD // PACKED if WHOLE else 1
    bytes = tl.arange(0, TILE_COLS // PACKED)[None, :]
    # [QUADS, rows], since Triton breaks ties by giving adjacent threads the first axis
    quads = tl.arange(0, QUADS)[:, None]
    scale_rows = tl.trans(rows) if HEIGHT == 1 else tl.zeros((1, 1), dtype=tl.int32)

    data, stride = buffer_rows(member, ROWWISE_DATA, row, tl.uint8, ALIGNMENT)
    codes = data + first_col // PACKED + rows * stride + bytes
    scales, stride = buffer_rows(member, ROWWISE_SCALE, row // HEIGHT, SCALE_DTYPE, 1)
    scales += first_col // WIDTH + scale_rows * stride + quads * QUAD // WIDTH
    if WHOLE:
        stored = tl.load(codes)
        scale = tl.load(scales)
    else:
        height = (tl.load(member + ROWS) - row).to(tl.int32)
        width = tl.load(member + COLS).to(tl.int32) - first_col
        stored = tl.load(codes, mask=(rows < height) & (bytes * PACKED < width), other=0)
        scale = tl.load(scales, mask=(scale_rows < height) & (quads * QUAD < width), other=0)
    factor, limit = _decode_scale(tl.trans(scale), global_amax, SCALE, DATA_MAX)
    element = _decode_elements(stored, ELEMENT)
    element = tl.reshape(element, (HELD_ROWS, QUADS, QUAD)) * factor[:, :, None]
    limit = tl.broadcast_to(limit[:, :, None], (HELD_ROWS, QUADS, QUAD))
    return tl.reshape(element, (HELD_ROWS, TILE_COLS)), tl.reshape(limit, (HELD_ROWS, TILE_COLS))


@triton.jit
def _decode_elements(stored, ELEMENT: tl.constexpr):
    """Return unscaled fp32 elements of bytes [R, N]: [R, N], or [R, N, 2] of packed ones."""
    if ELEMENT == "e4m3":
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # noqa: RET505 - Triton compiles code after a return
        packed = stored.to(tl.int32)
        codes = tl.join(packed, packed >> 4)
        if ELEMENT == "int4":
            return ((codes & 15) - 8).to(tl.float32)
        else:  # noqa: RET505
            # As fp32 exponent and mantissa, codes are 2^-126 times their values, 0.5 as a
            # subnormal.
            bits = (codes & 7) << 22 | (codes & 8) << 28
            return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _decode_scale(stored, global_amax, SCALE: tl.constexpr, DATA_MAX: tl.constexpr):
    """Return the fp32 factor of elements and limit of magnitudes, rounded as in the reference."""
    if SCALE == "e4m3":
        scale = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        global_amax = tl.maximum(global_amax, 7.899322037525772e-36)  # 2688 * 2^-128
        factor = (scale * global_amax) * (1.0 / 2688.0)
        limit = (scale * (1.0 / 256.0)) * global_amax
    elif SCALE == "e8m0":
        factor = power_of_two(stored.to(tl.int32))
        limit = factor * DATA_MAX
    elif SCALE == "bf16":
        factor = stored.to(tl.float32)
        limit = factor * (DATA_MAX + 0.5)
    else:
        factor = stored
        limit = _round_to_bf16(factor * DATA_MAX)
    return factor, limit
