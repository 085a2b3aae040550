# mypy: allow-incomplete-defs

"""Kernel that requantizes to the 2-D formats, rowwise: one square block serves both directions."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import (
    amax,
    e8m0_reciprocal,
    e8m0_round_up,
    encode_e2m1_pairs,
    encode_e4m3,
    fp8_block_code,
    fp8_block_factor,
    nvfp4_global_encode,
    power_of_two,
    round_to_bf16,
)
from moe_optim.kernels.exchange import AMAX_SLOTS as _AMAX_SLOTS
from moe_optim.kernels.tiles import (
    AMAX_SLOT,
    COLS,
    FIELDS,
    GLOBAL_AMAX,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    SOURCE,
    buffer_rows,
    is_owned,
    zero_gap,
)
from moe_optim.kernels.update_tile import STATE_FIELDS, read_state, update_tile

AMAX_SLOTS = tl.constexpr(_AMAX_SLOTS)


@triton.jit
def encode_scale(largest, global_encode, FORMAT: tl.constexpr):
    """Return the stored scale of a block, and the factor of its weights, fp32.

    ::

        mxfp8_2d        stored = E8M0 of amax * fl(1/448), rounded up;  factor = 2^(127 - stored)
        fp8_block       factor = largest power of two <= 448 / amax;    stored = 1 / factor
        fp8_block_fp32  factor = 448 / amax, at most the largest bf16;  stored = 1 / factor
        nvfp4           stored = E4M3 of amax * (S * fl(1/6));  factor = 1 / (stored * (1 / S))
                        S = 448 * 6 / amax of the expert, see nvfp4_global_encode

    Then data = E4M3 (E2M1) of w * factor, w = weight rounded to bf16. The order of operations is
    that of Transformer Engine 2.20. ``largest`` is the amax per block, ``global_encode`` is S.
    """
    if FORMAT == "mxfp8_2d":
        code = e8m0_round_up(largest * (1.0 / 448.0))
        stored, factor = code.to(tl.uint8), e8m0_reciprocal(code)
    elif FORMAT == "fp8_block":
        code = fp8_block_code(largest)
        stored, factor = e8m0_reciprocal(code), power_of_two(code)
    elif FORMAT == "fp8_block_fp32":
        factor = fp8_block_factor(largest)
        stored = tl.div_rn(1.0, factor)
    else:
        # Same association as TE, and multiplication by the rounded 1/6 instead of a division.
        scale = (largest * (global_encode * (1.0 / 6.0))).to(tl.float8e4nv)
        decoded = scale.to(tl.float32) * tl.div_rn(1.0, global_encode)
        factor = tl.minimum(tl.div_rn(1.0, decoded), 3.4028234663852886e38)
        stored = scale.to(tl.uint8, bitcast=True)
    return stored, factor


@triton.jit(do_not_specialize=["num_tiles"])
def requantize_blocks_kernel(
    descriptors,  # [num_members + num_gaps, FIELDS] int64, see fields.py
    tiles,  # [num_programs, 4] int32: descriptor, first row, first column, slot
    amaxes,  # [num_slots] fp32
    num_tiles,
    states,  # [num_members, STATE_FIELDS] int64, see fields.py; None without an update
    hyper,  # [num_groups, HYPER_FIELDS] fp32, or None
    clips,  # [num_norms] fp32, or None
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD_ROWS: tl.constexpr,
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
    """Requantize one tile [BLOCK, TILE_COLS] of one member, or zero one tile of a gap.

    Grid (num_programs,): member tiles first. Blocks at the edges of a weight may be partial. CUT
    tiles use the maxima of all ranks, and write every scale but only owned data. A RULE
    first updates the masters, which are then the sources; not for formats with a global amax.
    """
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    IS_FP8_BLOCK: tl.constexpr = FORMAT == "fp8_block" or FORMAT == "fp8_block_fp32"
    SCALE: tl.constexpr = tl.float32 if IS_FP8_BLOCK else tl.uint8
    PACKED: tl.constexpr = 2 if FORMAT == "nvfp4" else 1  # elements per byte
    # Elements of a 16-byte read, so that reads and writes share a layout.
    DATA_ALIGNMENT: tl.constexpr = ((4 if FROM_FP32 else 8) if ALIGNED else PACKED) // PACKED
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
        top, left = tl.multiple_of(first_row, BLOCK), tl.multiple_of(first_col, BLOCK)
        row = top.to(tl.int64)  # a weight may exceed 2^31 elements, a tile row may not
        height = tl.load(member + ROWS).to(tl.int32) - top
        cols = tl.load(member + COLS).to(tl.int32)
        if ALIGNED:
            cols = tl.multiple_of(cols, 4 if FROM_FP32 else 8)
        source = tl.load(member + SOURCE).to(tl.pointer_type(DTYPE))
        first = row * cols + left
        source = tl.multiple_of(source, SOURCE_ALIGNMENT) + first
        data, data_stride = buffer_rows(member, ROWWISE_DATA, row, tl.uint8, DATA_ALIGNMENT)
        scale, _ = buffer_rows(member, ROWWISE_SCALE, row // BLOCK, SCALE, 1)

        columns = tl.arange(0, TILE_COLS)[None, :]
        blocks = tl.arange(0, TILE_COLS // BLOCK)
        blocks_inside = blocks * BLOCK < cols - left if MASKED or CUT else None

        read = read_state(state, hyper, clips, first, RULE, GRADIENT, MOMENTS, ALIGNED)
        # A few rows at a time: four tensors of a whole block do not fit in registers.
        held = ()
        largest = tl.zeros((TILE_COLS // BLOCK,), dtype=tl.float32)
        for number in tl.static_range(BLOCK // HELD_ROWS):
            rows = number * HELD_ROWS + tl.arange(0, HELD_ROWS)[:, None]
            places = rows * cols + columns
            mask = _inside(member, row, left, rows, columns, height, cols, MASKED, CUT)
            weight = round_to_bf16(update_tile(source, places, mask, read, RULE))
            if not CUT:
                of_columns = tl.reshape(amax(weight, 0), (TILE_COLS // BLOCK, BLOCK))
                largest = tl.maximum(largest, amax(of_columns, 1))
            held = held + (weight.to(tl.bfloat16),)  # type: ignore[assignment]

        if CUT:
            largest = tl.load(slots + left // BLOCK + blocks, mask=blocks_inside, other=0.0)
        global_encode = 1.0
        if FORMAT == "nvfp4":  # after the loads of weights: this waits for three dependent loads
            global_encode = find_global_encode(member, amaxes, left)
        stored, factor = encode_scale(largest, global_encode, FORMAT)
        tl.store(scale + left // BLOCK + blocks, stored, mask=blocks_inside)

        for number in tl.static_range(BLOCK // HELD_ROWS):
            rows = number * HELD_ROWS + tl.arange(0, HELD_ROWS)[:, None]
            mask = _inside(member, row, left, rows, columns, height, cols, MASKED, CUT)
            weight = tl.reshape(held[number].to(tl.float32), (HELD_ROWS, TILE_COLS // BLOCK, BLOCK))
            scaled = tl.reshape(weight * factor[None, :, None], (HELD_ROWS, TILE_COLS))
            codes = data + left // PACKED + rows * data_stride
            if PACKED == 2:
                packed = encode_e2m1_pairs(tl.reshape(scaled, (HELD_ROWS, TILE_COLS // 2, 2)))
                pairs = tl.arange(0, TILE_COLS // 2)[None, :]
                # both columns of a byte have one owner: cuts and sizes are even
                both = _inside(member, row, left, rows, 2 * pairs, height, cols, MASKED, CUT)
                tl.store(codes + pairs, packed, mask=both)
            else:
                tl.store(codes + columns, encode_e4m3(scaled), mask=mask)
            if ZERO:
                tl.debug_barrier()  # all threads have read the source
                zeros = tl.zeros((HELD_ROWS, TILE_COLS), dtype=DTYPE)
                tl.store(source + rows * cols + columns, zeros, mask=mask)
    elif ZERO:
        zero_gap(member, first_col)


@triton.jit
def find_global_encode(member, amaxes, first_col):
    """Return the fp32 encode scale of an expert from the maxima of its parts; store its amax."""
    parts = amaxes + tl.load(member + AMAX_SLOT) + tl.arange(0, AMAX_SLOTS // 2)
    # One value per lane: every warp finds the maximum by itself, without a barrier.
    largest = tl.maximum(tl.load(parts), tl.load(parts + AMAX_SLOTS // 2))
    largest = tl.max(largest, 0)
    target = tl.load(member + GLOBAL_AMAX).to(tl.pointer_type(tl.float32))
    tl.store(target, largest, mask=first_col == 0)
    return nvfp4_global_encode(largest)


@triton.jit
def _inside(
    member,
    row,
    first_col,
    rows,
    columns,
    height,
    cols,
    MASKED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Return the mask of valid and owned elements of a tile, or None for all.

    ``row`` and ``first_col`` are the tile's origin in the weight, ``rows`` and ``columns`` offsets
    from it. ``height`` counts the rows of the weight from ``row`` on.
    """
    mask = None
    if MASKED or CUT:
        mask = (rows < height) & (columns < cols - first_col)
        if CUT:
            mask &= is_owned(member, row, first_col, rows, columns, cols)
    return mask
