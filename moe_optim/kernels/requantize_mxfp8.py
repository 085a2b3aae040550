# mypy: allow-incomplete-defs

"""Requantization to MXFP8: all experts of all weights in one launch, both directions at once."""

import torch
import triton
import triton.language as tl

from moe_optim.formats import MXFP8
from moe_optim.kernels.encode import (
    amax,
    e8m0_reciprocal,
    e8m0_round_up,
    encode_e4m3,
    round_to_bf16,
)
from moe_optim.kernels.launch_table import DESCRIPTOR_FIELDS, GAP_TILE, LaunchTable
from moe_optim.kernels.tuning import BLOCK


def requantize_mxfp8(table: LaunchTable) -> None:
    """Rewrite the MXFP8 storage of every member from its source, in place, in one launch.

    It neither allocates nor waits for the device, so a CUDA graph can capture it once it has run
    outside of one. Sources and gaps are left as zeros if the table says so.
    """
    with torch.cuda.device_of(table.descriptors):
        _requantize_mxfp8_kernel[(table.num_programs,)](
            table.descriptors,
            table.tiles,
            table.num_tiles,
            FIELDS=DESCRIPTOR_FIELDS,
            SCALE_OF_AMAX=1.0 / MXFP8.data_max,
            BLOCK=BLOCK,
            COLS=table.tile.cols,
            GAP_TILE=GAP_TILE,
            FROM_FP32=table.source_dtype == torch.float32,
            MASKED=table.masked,
            ALIGNED=table.aligned,
            ZERO=table.zeroes,
            num_warps=table.tile.num_warps,
        )


@triton.jit(do_not_specialize=["num_tiles"])
def _requantize_mxfp8_kernel(
    descriptors,  # [num_members + num_gaps, FIELDS] int64, see LaunchTable
    tiles,  # [num_programs, 3] int32: descriptor, first row, first column
    num_tiles,
    FIELDS: tl.constexpr,
    SCALE_OF_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    GAP_TILE: tl.constexpr,
    FROM_FP32: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Requantize one tile [BLOCK, COLS] of one member, or zero one tile of a gap.

    Grid (num_programs,): members' tiles first. A block never straddles two tiles, because rows and
    columns are multiples of BLOCK (checked by MXFP8): no partial maxima, no atomics.
    """
    program = tl.program_id(0).to(tl.int64)
    member = descriptors + tl.load(tiles + 3 * program).to(tl.int64) * FIELDS
    first_row = tl.load(tiles + 3 * program + 1)
    first_col = tl.load(tiles + 3 * program + 2)
    if program < num_tiles:
        _requantize_tile(
            member,
            tl.multiple_of(first_row, BLOCK),
            tl.multiple_of(first_col, BLOCK),
            SCALE_OF_AMAX,
            BLOCK,
            COLS,
            FROM_FP32,
            MASKED,
            ALIGNED,
            ZERO,
        )
    elif ZERO:
        _zero_gap(member, first_col, GAP_TILE)


@triton.jit
def _requantize_tile(
    member,
    first_row,
    first_col,
    SCALE_OF_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    FROM_FP32: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Write both planes and both scales of one tile, and zeros over its source if ZERO."""
    SOURCE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    # Data is promised no more alignment than the elements of a 16-byte read fill: then one layout
    # serves reads and writes, and nothing moves between threads.
    DATA_ALIGNMENT: tl.constexpr = (4 if FROM_FP32 else 8) if ALIGNED else 1
    SOURCE_ALIGNMENT: tl.constexpr = 16 if ALIGNED else SOURCE.primitive_bitwidth // 8

    source = tl.load(member).to(tl.pointer_type(SOURCE))
    rowwise_data = tl.load(member + 1).to(tl.pointer_type(tl.uint8))
    rowwise_scale = tl.load(member + 2).to(tl.pointer_type(tl.uint8))
    columnwise_data = tl.load(member + 3).to(tl.pointer_type(tl.uint8))
    columnwise_scale = tl.load(member + 4).to(tl.pointer_type(tl.uint8))
    cols = tl.multiple_of(tl.load(member + 6).to(tl.int32), BLOCK)
    rowwise_data_stride = tl.multiple_of(tl.load(member + 7).to(tl.int32), DATA_ALIGNMENT)
    rowwise_scale_stride = tl.load(member + 8).to(tl.int32)
    columnwise_data_stride = tl.multiple_of(tl.load(member + 9).to(tl.int32), DATA_ALIGNMENT)
    columnwise_scale_stride = tl.load(member + 10).to(tl.int32)

    row64 = first_row.to(tl.int64)  # a weight may have more than 2^31 elements, a tile row not
    source = tl.multiple_of(source, SOURCE_ALIGNMENT) + row64 * cols + first_col
    rowwise_data = tl.multiple_of(rowwise_data, DATA_ALIGNMENT)
    rowwise_data += row64 * rowwise_data_stride + first_col
    columnwise_data = tl.multiple_of(columnwise_data, DATA_ALIGNMENT)
    columnwise_data += row64 * columnwise_data_stride + first_col
    rowwise_scale += row64 * rowwise_scale_stride + first_col // BLOCK
    columnwise_scale += row64 // BLOCK * columnwise_scale_stride + first_col

    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, COLS)
    blocks = tl.arange(0, COLS // BLOCK)
    source += rows * cols + columns[None, :]
    if MASKED:
        inside = columns < cols - first_col
        blocks_inside = blocks < (cols - first_col) // BLOCK
        data_mask = tl.broadcast_to(inside[None, :], (BLOCK, COLS))
        scale_mask = tl.broadcast_to(blocks_inside[None, :], (BLOCK, COLS // BLOCK))
        weight = round_to_bf16(tl.load(source, mask=data_mask, other=0.0))
    else:
        inside = None
        data_mask = None
        scale_mask = None
        weight = round_to_bf16(tl.load(source))

    code = e8m0_round_up(amax(weight, 0) * SCALE_OF_AMAX)  # [COLS]
    tl.store(columnwise_scale + columns, code.to(tl.uint8), mask=inside)
    data = encode_e4m3(weight * e8m0_reciprocal(code)[None, :])
    columnwise_data += rows * columnwise_data_stride + columns[None, :]
    tl.store(columnwise_data, data, mask=data_mask)

    runs = tl.reshape(weight, (BLOCK, COLS // BLOCK, BLOCK))
    code = e8m0_round_up(amax(runs, 2) * SCALE_OF_AMAX)  # [BLOCK, COLS / BLOCK]
    rowwise_scale += rows * rowwise_scale_stride + blocks[None, :]
    tl.store(rowwise_scale, code.to(tl.uint8), mask=scale_mask)
    data = tl.reshape(encode_e4m3(runs * e8m0_reciprocal(code)[:, :, None]), (BLOCK, COLS))
    rowwise_data += rows * rowwise_data_stride + columns[None, :]
    tl.store(rowwise_data, data, mask=data_mask)

    if ZERO:
        tl.debug_barrier()  # every thread has read its part by now
        tl.store(source, tl.zeros((BLOCK, COLS), dtype=SOURCE), mask=data_mask)


@triton.jit
def _zero_gap(gap, first, GAP_TILE: tl.constexpr):
    """Zero up to GAP_TILE two-byte units of a gap, from its unit ``first`` on."""
    memory = tl.load(gap).to(tl.pointer_type(tl.int16))
    left = tl.load(gap + 1).to(tl.int32) - first
    units = tl.arange(0, GAP_TILE)
    tl.store(memory + first + units, tl.zeros((GAP_TILE,), dtype=tl.int16), mask=units < left)
