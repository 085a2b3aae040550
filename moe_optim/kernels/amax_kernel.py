# mypy: allow-incomplete-defs

"""Kernels for the maxima that encoding needs first: of whole experts, and of cut block rows."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import amax, larger_magnitude, round_to_bf16
from moe_optim.kernels.exchange import AMAX_SLOTS as _AMAX_SLOTS
from moe_optim.kernels.tiles import (
    AMAX_SLOT,
    BEGIN,
    COLS,
    END,
    FIELDS,
    ROWS,
    SOURCE,
    is_owned,
)
from moe_optim.kernels.tuning import AMAX_TILE as _AMAX_TILE

AMAX_SLOTS = tl.constexpr(_AMAX_SLOTS)
AMAX_TILE = tl.constexpr(_AMAX_TILE)


@triton.jit
def expert_amax_kernel(
    descriptors,  # [num_members + num_gaps, FIELDS] int64, see fields.py
    parts,  # [num_parts, 2] int32: descriptor, part
    amaxes,  # [num_slots] fp32
    FROM_FP32: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the amax of one part of an expert's owned elements to its slot; grid (num_parts,)."""
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    program = tl.program_id(0).to(tl.int64)
    member = descriptors + tl.load(parts + 2 * program).to(tl.int64) * FIELDS
    part = tl.load(parts + 2 * program + 1)
    begin = tl.load(member + BEGIN)
    end = tl.load(member + END)
    source = tl.load(member + SOURCE).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        begin = tl.multiple_of(begin, 16 // (DTYPE.primitive_bitwidth // 8))
    length = tl.cdiv(tl.cdiv(end - begin, AMAX_SLOTS), AMAX_TILE) * AMAX_TILE
    first = begin + part * length
    length = tl.minimum(length, end - first).to(tl.int32)
    source += first
    largest = tl.zeros((TILE,), dtype=tl.float32)
    places = tl.arange(0, TILE)
    whole = length - length % TILE
    for start in tl.range(0, whole, TILE, loop_unroll_factor=4):  # unmasked: wide accesses
        largest = larger_magnitude(largest, tl.load(source + start + places))
    if whole < length:
        places += whole
        largest = larger_magnitude(
            largest, tl.load(source + places, mask=places < length, other=0.0)
        )
    # Rounding is monotonic: the rounded maximum is the maximum of the rounded values.
    slot = amaxes + tl.load(member + AMAX_SLOT) + part
    tl.store(slot, round_to_bf16(tl.max(largest, 0)))


@triton.jit
def cut_block_row_amax_kernel(
    descriptors,  # [num_members + num_gaps, FIELDS] int64, see fields.py
    tiles,  # [num_cut_tiles, 4] int32: descriptor, first row, first column, slot
    amaxes,  # [num_slots] fp32
    BLOCK_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_WAY: tl.constexpr,
    TILE_COLS: tl.constexpr,
    FROM_FP32: tl.constexpr,
):
    """Write this rank's share of the maxima of one tile [BLOCK_ROW, TILE_COLS] of a cut block row.

    Grid (num_cut_tiles,). The slots of a block row hold one maximum per block for formats that are
    quantized in one direction (ONE_WAY), else the maxima of the columns, then those of the runs of
    BLOCK columns, row by row.
    """
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    tile = tiles + 4 * tl.program_id(0).to(tl.int64)
    member = descriptors + tl.load(tile).to(tl.int64) * FIELDS
    row = tl.load(tile + 1).to(tl.int64)
    first_col = tl.load(tile + 2)
    slots = amaxes + tl.load(tile + 3)
    cols = tl.load(member + COLS).to(tl.int32)
    height = (tl.load(member + ROWS) - row).to(tl.int32)
    source = tl.load(member + SOURCE).to(tl.pointer_type(DTYPE)) + row * cols + first_col

    rows = tl.arange(0, BLOCK_ROW)[:, None]
    columns = tl.arange(0, TILE_COLS)
    blocks = tl.arange(0, TILE_COLS // BLOCK)
    mask = (rows < height) & (columns[None, :] < cols - first_col)
    mask &= is_owned(member, row, first_col, rows, columns[None, :], cols)
    weight = tl.load(source + rows * cols + columns[None, :], mask=mask, other=0.0)
    weight = round_to_bf16(weight)
    of_columns = amax(weight, 0)
    blocks_inside = blocks * BLOCK < cols - first_col
    if ONE_WAY:
        largest = amax(tl.reshape(of_columns, (TILE_COLS // BLOCK, BLOCK)), 1)
        tl.store(slots + first_col // BLOCK + blocks, largest, mask=blocks_inside)
    else:
        tl.store(slots + first_col + columns, of_columns, mask=columns < cols - first_col)
        largest = amax(tl.reshape(weight, (BLOCK_ROW, TILE_COLS // BLOCK, BLOCK)), 2)
        slots += cols + rows * (cols // BLOCK) + first_col // BLOCK + blocks[None, :]
        inside = tl.broadcast_to(blocks_inside[None, :], (BLOCK_ROW, TILE_COLS // BLOCK))
        tl.store(slots, largest, mask=inside)
