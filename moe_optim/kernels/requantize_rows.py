# mypy: allow-incomplete-defs

"""Kernel that requantizes to the row-only formats: one scale per run of a row."""

import triton
import triton.language as tl

from moe_optim.kernels.encode import (
    amax,
    divide,
    e8m0_reciprocal,
    e8m0_round_up,
    encode_e2m1_pairs,
    encode_e4m3,
    encode_int4_pairs,
    round_to_bf16,
)
from moe_optim.kernels.requantize_blocks import encode_scale, find_global_encode
from moe_optim.kernels.tiles import (
    COLS,
    FIELDS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    SOURCE,
    buffer_rows,
    is_owned,
    zero_gap,
)
from moe_optim.kernels.update_tile import STATE_FIELDS, read_state, update_tile


@triton.jit
def encode_row_scale(largest, global_encode, SCALE: tl.constexpr, DATA_MAX: tl.constexpr):
    """Return the stored scale of a block, and the fp32 factor of its weights; INT4 divides by it.

    ::

        e8m0   stored = E8M0 of amax * fl(1 / DATA_MAX), rounded up;  factor = 2^(127 - stored)
        bf16   factor = max(amax * fl(1 / DATA_MAX), 1e-5);           stored = bf16 of factor
        e4m3   as NVFP4, see ``encode_scale``
    """
    if SCALE == "e8m0":
        code = e8m0_round_up(largest * (1.0 / DATA_MAX))
        stored, factor = code.to(tl.uint8), e8m0_reciprocal(code)
    elif SCALE == "bf16":
        factor = tl.maximum(largest * (1.0 / DATA_MAX), 1e-5)
        stored = factor.to(tl.bfloat16)
    else:
        stored, factor = encode_scale(largest, global_encode, "nvfp4")
    return stored, factor


@triton.jit(do_not_specialize=["num_tiles"])
def requantize_rows_kernel(
    descriptors,  # [num_members + num_gaps, FIELDS] int64, see fields.py
    tiles,  # [num_programs, 4] int32: descriptor, first row, first column, slot or height
    amaxes,  # [num_slots] fp32
    num_tiles,
    states,  # [num_members, STATE_FIELDS] int64, see fields.py; None without an update
    hyper,  # [num_groups, HYPER_FIELDS] fp32, or None
    clips,  # [num_norms] fp32, or None
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    DATA_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
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
    """Requantize one tile [TILE_ROWS, TILE_COLS] of one member, or zero one tile of a gap.

    A block is BLOCK elements of a row, so a row is a block row. Grid (num_programs,): member tiles
    first; where some are MASKED, those have a height, and the others 0. CUT tiles of one row use
    the maxima of all ranks, and write every scale but only owned data. A RULE first updates the
    masters, which are then the sources; not for formats with a global amax.
    """
    program = tl.program_id(0).to(tl.int64)
    tile = tiles + 4 * program
    member = descriptors + tl.load(tile).to(tl.int64) * FIELDS
    first_row = tl.load(tile + 1)
    first_col = tl.multiple_of(tl.load(tile + 2), TILE_COLS)
    last = tl.load(tile + 3)
    if program < num_tiles:
        state = None
        if RULE != "none":
            state = states + tl.load(tile).to(tl.int64) * STATE_FIELDS
        is_partial = False  # a branch, so that the masks of the last tiles do not slow the others
        if MASKED and not CUT:
            is_partial = last != 0
        if is_partial:
            _requantize_tile(
                member, first_row, first_col, last, amaxes, ELEMENT, SCALE, DATA_MAX, BLOCK,
                TILE_ROWS, TILE_COLS, FROM_FP32, True, ALIGNED, CUT, ZERO, state, hyper, clips,
                RULE, GRADIENT, MOMENTS,
            )  # fmt: skip
        else:
            _requantize_tile(
                member, first_row, first_col, last, amaxes, ELEMENT, SCALE, DATA_MAX, BLOCK,
                TILE_ROWS, TILE_COLS, FROM_FP32, False, ALIGNED, CUT, ZERO, state, hyper, clips,
                RULE, GRADIENT, MOMENTS,
            )  # fmt: skip
    elif ZERO:
        zero_gap(member, first_col)


@triton.jit
def _requantize_tile(
    member,
    first_row,
    first_col,
    last,
    amaxes,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    DATA_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    FROM_FP32: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CUT: tl.constexpr,
    ZERO: tl.constexpr,
    state,
    hyper,
    clips,
    RULE: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    DTYPE: tl.constexpr = tl.float32 if FROM_FP32 else tl.bfloat16
    SCALE_DTYPE: tl.constexpr = tl.bfloat16 if SCALE == "bf16" else tl.uint8
    PACKED: tl.constexpr = 1 if ELEMENT == "e4m3" else 2  # elements per byte
    BLOCKS: tl.constexpr = TILE_COLS // BLOCK
    # Elements of a 16-byte read, so that reads and writes share a layout.
    DATA_ALIGNMENT: tl.constexpr = ((4 if FROM_FP32 else 8) if ALIGNED else PACKED) // PACKED
    SOURCE_ALIGNMENT: tl.constexpr = 16 if ALIGNED else DTYPE.primitive_bitwidth // 8

    row = first_row.to(tl.int64)  # a weight may exceed 2^31 elements, a tile may not
    cols = tl.multiple_of(tl.load(member + COLS).to(tl.int32), BLOCK)
    source = tl.load(member + SOURCE).to(tl.pointer_type(DTYPE))
    first = row * cols + first_col
    source = tl.multiple_of(source, SOURCE_ALIGNMENT) + first
    data, data_stride = buffer_rows(member, ROWWISE_DATA, row, tl.uint8, DATA_ALIGNMENT)
    scale, scale_stride = buffer_rows(member, ROWWISE_SCALE, row, SCALE_DTYPE, 1)

    rows = tl.arange(0, TILE_ROWS)[:, None]
    columns = tl.arange(0, TILE_COLS)[None, :]
    blocks = tl.arange(0, BLOCKS)[None, :]
    bytes = tl.arange(0, TILE_COLS // PACKED)[None, :]
    places = rows * cols + columns
    mask = _inside(member, row, first_col, rows, columns, last, cols, MASKED, CUT)
    # All elements of a byte have one owner: cuts and widths are even.
    byte_mask = _inside(member, row, first_col, rows, bytes * PACKED, last, cols, MASKED, CUT)
    if CUT:
        scale_mask = blocks * BLOCK < cols - first_col
    else:
        scale_mask = _inside(member, row, first_col, rows, blocks * BLOCK, last, cols, MASKED, CUT)
    read = read_state(state, hyper, clips, first, RULE, GRADIENT, MOMENTS, ALIGNED)
    weight = update_tile(source, places, mask, read, RULE)
    global_encode = 1.0
    if SCALE == "e4m3":  # while the weights are on their way: this waits for three dependent loads
        global_encode = find_global_encode(member, amaxes, first_col)
    runs = tl.reshape(round_to_bf16(weight), (TILE_ROWS, BLOCKS, BLOCK))

    if CUT:
        slots = amaxes + last + first_col // BLOCK + blocks
        largest = tl.load(slots, mask=scale_mask, other=0.0)
    else:
        largest = amax(runs, 2)
    stored, factor = encode_row_scale(largest, global_encode, SCALE, DATA_MAX)
    scale += first_col // BLOCK + rows * scale_stride + blocks
    tl.store(scale, stored, mask=scale_mask)

    factor = factor[:, :, None]
    scaled = divide(runs, factor) if ELEMENT == "int4" else runs * factor
    if ELEMENT == "e4m3":
        codes = encode_e4m3(tl.reshape(scaled, (TILE_ROWS, TILE_COLS)))
    elif ELEMENT == "e2m1":
        codes = encode_e2m1_pairs(tl.reshape(scaled, (TILE_ROWS, TILE_COLS // 2, 2)))
    else:
        codes = encode_int4_pairs(tl.reshape(scaled, (TILE_ROWS, TILE_COLS // 2, 2)))
    data += first_col // PACKED + rows * data_stride + bytes
    tl.store(data, codes, mask=byte_mask)

    if ZERO:
        tl.debug_barrier()  # all threads have read the source
        zeros = tl.zeros((TILE_ROWS, TILE_COLS), dtype=DTYPE)
        tl.store(source + places, zeros, mask=mask)


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
    from it. ``height`` counts the rows of a MASKED tile.
    """
    mask = None
    if CUT:
        mask = (columns < cols - first_col) & is_owned(member, row, first_col, rows, columns, cols)
    elif MASKED:
        mask = (columns < cols - first_col) & (rows < height)
    return mask
