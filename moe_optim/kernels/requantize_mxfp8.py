# mypy: allow-incomplete-defs

"""Kernel that requantizes to MXFP8: all experts of all weights in one launch, both directions."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import (
    amax,
    e8m0_reciprocal,
    e8m0_round_up,
    encode_e4m3,
    round_to_bf16,
)
from moe_optim.kernels.tiles import (
    COLS,
    COLUMNWISE_DATA,
    COLUMNWISE_SCALE,
    FIELDS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    SOURCE,
    buffer_rows,
    is_owned,
    zero_gap,
)
from moe_optim.kernels.update_tile import STATE_FIELDS, read_state, update_tile

BLOCK = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_tiles"])
def requantize_mxfp8_kernel(
    descriptors,  # [num_members + num_gaps, FIELDS] int64, see fields.py
    tiles,  # [num_programs, 4] int32: descriptor, first row, first column, slot
    amaxes,  # [num_slots] fp32
    num_tiles,
    states,  # [num_members, STATE_FIELDS] int64, see fields.py; None without an update
    hyper,  # [num_groups, HYPER_FIELDS] fp32, or None
    clips,  # [num_norms] fp32, or None
    TILE_COLS: tl.constexpr,
    FROM_FP32: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CUT: tl.constexpr,
    ZERO: tl.constexpr,
    RULE: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    """Requantize one tile [32, TILE_COLS] of one member, or zero one tile of a gap.

    A block is 32 elements of a row, and for the columnwise data 32 of a column::

        code = E8M0 of amax * fl(1/448), rounded up    so that no element exceeds 448
        data = E4M3 of w * 2^(127 - code)              w = weight rounded to bf16

    Matches Transformer Engine 2.20; formats as in the OCP MX specification 1.0.

    Grid (num_programs,): member tiles first. Rows and columns are multiples of 32, so a block never
    straddles two tiles, and neither partial maxima nor atomics are needed. CUT tiles use the maxima
    of all ranks, and write every scale but only owned data. A RULE first updates the masters,
    which are then the sources.
    """
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    # Hint no more data alignment than the elements of a 16-byte read: reads and writes then share a
    # layout, without a conversion between threads.
    DATA_ALIGNMENT: tl.constexpr = (4 if FROM_FP32 else 8) if ALIGNED else 1
    SOURCE_ALIGNMENT: tl.constexpr = 16 if ALIGNED else DTYPE.primitive_bitwidth // 8

    program = tl.program_id(0).to(tl.int64)
    tile = tiles + 4 * program
    member = descriptors + tl.load(tile).to(tl.int64) * FIELDS
    first_row = tl.load(tile + 1)
    first_col = tl.load(tile + 2)
    slots = amaxes + tl.load(tile + 3)
    if program < num_tiles:
        state = None
        if RULE != "none":
            state = states + tl.load(tile).to(tl.int64) * STATE_FIELDS
        # a weight may exceed 2^31 elements, a tile row may not
        row = tl.multiple_of(first_row, BLOCK).to(tl.int64)
        left = tl.multiple_of(first_col, BLOCK)
        cols = tl.multiple_of(tl.load(member + COLS).to(tl.int32), BLOCK)
        source = tl.load(member + SOURCE).to(tl.pointer_type(DTYPE))
        first = row * cols + left
        source = tl.multiple_of(source, SOURCE_ALIGNMENT) + first
        rowwise_data, rowwise_data_stride = buffer_rows(
            member, ROWWISE_DATA, row, tl.uint8, DATA_ALIGNMENT
        )
        rowwise_scale, rowwise_scale_stride = buffer_rows(member, ROWWISE_SCALE, row, tl.uint8, 1)
        columnwise_data, columnwise_data_stride = buffer_rows(
            member, COLUMNWISE_DATA, row, tl.uint8, DATA_ALIGNMENT
        )
        columnwise_scale, _ = buffer_rows(member, COLUMNWISE_SCALE, row // BLOCK, tl.uint8, 1)

        rows = tl.arange(0, BLOCK)[:, None]
        columns = tl.arange(0, TILE_COLS)
        blocks = tl.arange(0, TILE_COLS // BLOCK)
        places = rows * cols + columns[None, :]
        if MASKED or CUT:
            inside = columns < cols - left
            blocks_inside = blocks < (cols - left) // BLOCK
            data_mask = tl.broadcast_to(inside[None, :], (BLOCK, TILE_COLS))
            scale_mask = tl.broadcast_to(blocks_inside[None, :], (BLOCK, TILE_COLS // BLOCK))
            if CUT:
                data_mask &= is_owned(member, row, left, rows, columns[None, :], cols)
        else:
            inside = None
            data_mask = None
            scale_mask = None
        read = read_state(state, hyper, clips, first, RULE, GRADIENT, MOMENTS, ALIGNED)
        weight = round_to_bf16(update_tile(source, places, data_mask, read, RULE))

        if CUT:
            largest = tl.load(slots + left + columns, mask=inside, other=0.0)
        else:
            largest = amax(weight, 0)
        code = e8m0_round_up(largest * (1.0 / 448.0))  # [TILE_COLS]
        tl.store(columnwise_scale + left + columns, code.to(tl.uint8), mask=inside)
        data = encode_e4m3(weight * e8m0_reciprocal(code)[None, :])
        columnwise_data += left + rows * columnwise_data_stride + columns[None, :]
        tl.store(columnwise_data, data, mask=data_mask)

        runs = tl.reshape(weight, (BLOCK, TILE_COLS // BLOCK, BLOCK))
        if CUT:
            places_of_runs = cols + rows * (cols // BLOCK) + left // BLOCK + blocks[None, :]
            largest = tl.load(slots + places_of_runs, mask=scale_mask, other=0.0)
        else:
            largest = amax(runs, 2)
        code = e8m0_round_up(largest * (1.0 / 448.0))  # [BLOCK, TILE_COLS / BLOCK]
        rowwise_scale += left // BLOCK + rows * rowwise_scale_stride + blocks[None, :]
        tl.store(rowwise_scale, code.to(tl.uint8), mask=scale_mask)
        data = tl.reshape(encode_e4m3(runs * e8m0_reciprocal(code)[:, :, None]), (BLOCK, TILE_COLS))
        rowwise_data += left + rows * rowwise_data_stride + columns[None, :]
        tl.store(rowwise_data, data, mask=data_mask)

        if ZERO:
            tl.debug_barrier()  # all threads have read the source
            zeros = tl.zeros((BLOCK, TILE_COLS), dtype=DTYPE)
            tl.store(source + places, zeros, mask=data_mask)
    elif ZERO:
        zero_gap(member, first_col)
