# mypy: allow-incomplete-defs

"""Kernel for buffers derived after a gather: columnwise copies and padded scales."""

import triton
import triton.language as tl

ACROSS = tl.constexpr(32)  # lines across a block, if more than one


@triton.jit(do_not_specialize=["num_transposes"])
def finish_gather_kernel(
    copies,  # [num_copies, 8] int64, see member_table.Copy
    tiles,  # [num_programs, 3] int32: copy, first row, first column
    num_transposes,
    PACK: tl.constexpr,
    WORDS: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REPEATS: tl.constexpr,
    FP32_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
    ALIGNED_SCALES: tl.constexpr,
):
    """Transpose a tile of data, or expand a tile of scales; grid (num_programs,), data first."""
    program = tl.program_id(0).to(tl.int64)
    copy = copies + tl.load(tiles + 3 * program).to(tl.int64) * 8
    first_row = tl.load(tiles + 3 * program + 1)
    first_col = tl.load(tiles + 3 * program + 2)
    if program < num_transposes:
        if PACK == 1:
            _transpose_bytes(copy, first_row, first_col, WORDS, PACKS)
        else:
            _transpose_words(copy, first_row, first_col, PACK, WORDS, PACKS, ALIGNED)
    else:
        _expand(
            copy,
            first_row,
            first_col,
            BLOCK_ROWS,
            BLOCK_COLS,
            REPEATS,
            FP32_SCALES,
            ALIGNED_SCALES,
        )


@triton.jit
def _swap(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Exchange the bits of ``a`` at MASK << SHIFT with the bits of ``b`` at MASK."""
    difference = ((a >> SHIFT) ^ b) & MASK
    return a ^ (difference << SHIFT), b ^ difference


@triton.jit
def _store_column(target, word, column: tl.constexpr, stride, mask):
    tl.store(target + column * stride, tl.trans(word), mask=mask)


@triton.jit
def _transpose_words(
    copy,
    first_row,
    first_col,
    PACK: tl.constexpr,
    WORDS: tl.constexpr,
    PACKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Transpose [PACK * PACKS, PACK * WORDS] elements, PACK of them per 32-bit word.

    Registers transpose squares of PACK x PACK elements, one word per row; stores permute the
    squares. All sizes are multiples of PACK.
    """
    WORD: tl.constexpr = tl.uint32
    ROW: tl.constexpr = 4 if ALIGNED else 1  # words that row starts are multiples of
    rows = tl.load(copy + 2).to(tl.int32)
    cols = tl.load(copy + 3).to(tl.int32)
    source_stride = tl.multiple_of(tl.load(copy + 4).to(tl.int32) // 4, ROW)  # words
    target_stride = tl.multiple_of(tl.load(copy + 5).to(tl.int32) // 4, ROW)
    packs = tl.arange(0, PACKS)
    words = tl.arange(0, WORDS)

    source = tl.multiple_of(tl.load(copy).to(tl.pointer_type(WORD)), 4 * ROW)
    source += first_row.to(tl.int64) * source_stride + first_col // PACK
    source += packs[:, None] * (PACK * source_stride) + words[None, :]
    mask = (packs[:, None] * PACK < rows - first_row) & (words[None, :] * PACK < cols - first_col)
    a0 = tl.load(source, mask=mask, other=0)
    a1 = tl.load(source + source_stride, mask=mask, other=0)
    a2 = tl.load(source + 2 * source_stride, mask=mask, other=0)
    a3 = tl.load(source + 3 * source_stride, mask=mask, other=0)

    target = tl.multiple_of(tl.load(copy + 1).to(tl.pointer_type(WORD)), 4 * ROW)
    target += first_col.to(tl.int64) * target_stride + first_row // PACK
    target += words[:, None] * (PACK * target_stride) + packs[None, :]
    mask_t = (words[:, None] * PACK < cols - first_col) & (packs[None, :] * PACK < rows - first_row)
    if PACK == 4:
        a0, a2 = _swap(a0, a2, 16, 0x0000FFFF)
        a1, a3 = _swap(a1, a3, 16, 0x0000FFFF)
        a0, a1 = _swap(a0, a1, 8, 0x00FF00FF)
        a2, a3 = _swap(a2, a3, 8, 0x00FF00FF)
    else:
        a4 = tl.load(source + 4 * source_stride, mask=mask, other=0)
        a5 = tl.load(source + 5 * source_stride, mask=mask, other=0)
        a6 = tl.load(source + 6 * source_stride, mask=mask, other=0)
        a7 = tl.load(source + 7 * source_stride, mask=mask, other=0)
        a0, a4 = _swap(a0, a4, 16, 0x0000FFFF)
        a1, a5 = _swap(a1, a5, 16, 0x0000FFFF)
        a2, a6 = _swap(a2, a6, 16, 0x0000FFFF)
        a3, a7 = _swap(a3, a7, 16, 0x0000FFFF)
        a0, a2 = _swap(a0, a2, 8, 0x00FF00FF)
        a1, a3 = _swap(a1, a3, 8, 0x00FF00FF)
        a4, a6 = _swap(a4, a6, 8, 0x00FF00FF)
        a5, a7 = _swap(a5, a7, 8, 0x00FF00FF)
        a0, a1 = _swap(a0, a1, 4, 0x0F0F0F0F)
        a2, a3 = _swap(a2, a3, 4, 0x0F0F0F0F)
        a4, a5 = _swap(a4, a5, 4, 0x0F0F0F0F)
        a6, a7 = _swap(a6, a7, 4, 0x0F0F0F0F)
        _store_column(target, a4, 4, target_stride, mask_t)
        _store_column(target, a5, 5, target_stride, mask_t)
        _store_column(target, a6, 6, target_stride, mask_t)
        _store_column(target, a7, 7, target_stride, mask_t)
    _store_column(target, a0, 0, target_stride, mask_t)
    _store_column(target, a1, 1, target_stride, mask_t)
    _store_column(target, a2, 2, target_stride, mask_t)
    _store_column(target, a3, 3, target_stride, mask_t)


@triton.jit
def _transpose_bytes(copy, first_row, first_col, COLS: tl.constexpr, ROWS: tl.constexpr):
    """Transpose [ROWS, COLS] bytes of any alignment."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLS)
    rows_inside = rows < tl.load(copy + 2).to(tl.int32) - first_row
    columns_inside = columns < tl.load(copy + 3).to(tl.int32) - first_col
    source_stride = tl.load(copy + 4).to(tl.int32)
    target_stride = tl.load(copy + 5).to(tl.int32)
    source = tl.load(copy).to(tl.pointer_type(tl.uint8))
    source += first_row.to(tl.int64) * source_stride + first_col
    target = tl.load(copy + 1).to(tl.pointer_type(tl.uint8))
    target += first_col.to(tl.int64) * target_stride + first_row
    data = tl.load(
        source + rows[:, None] * source_stride + columns[None, :],
        mask=rows_inside[:, None] & columns_inside[None, :],
        other=0,
    )
    tl.store(
        target + columns[:, None] * target_stride + rows[None, :],
        tl.trans(data),
        mask=columns_inside[:, None] & rows_inside[None, :],
    )


@triton.jit
def _expand(
    copy,
    first_row,
    first_col,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REPEATS: tl.constexpr,
    FP32_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write [BLOCK_ROWS, BLOCK_COLS] block scales, each repeated over the lines of its block."""
    DTYPE: tl.constexpr = tl.float32 if FP32_SCALES else tl.uint8
    source = tl.load(copy).to(tl.pointer_type(DTYPE))
    target = tl.load(copy + 1).to(tl.pointer_type(DTYPE))
    block_rows = tl.load(copy + 2).to(tl.int32)
    block_cols = tl.load(copy + 3).to(tl.int32)
    down_stride = tl.load(copy + 4).to(tl.int32)
    across_stride = tl.load(copy + 5).to(tl.int32)
    target_stride = tl.load(copy + 6).to(tl.int32)
    if ALIGNED:
        target = tl.multiple_of(target, 4)
        target_stride = tl.multiple_of(target_stride, 4)
    lines = tl.load(copy + 7).to(tl.int32)
    down = lines & 0xFFFF
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = first_col + tl.arange(0, BLOCK_COLS)
    mask = (rows[:, None] < block_rows) & (columns[None, :] < block_cols)
    places = (
        rows[:, None].to(tl.int64) * down_stride + columns[None, :].to(tl.int64) * across_stride
    )
    scale = tl.load(source + places, mask=mask, other=0)
    target += (rows * down)[:, None].to(tl.int64) * target_stride
    if not REPEATS:
        tl.store(target + columns[None, :], scale, mask=mask)
    elif lines >> 16 == 1:
        for line in range(down):
            tl.store(target + line * target_stride + columns[None, :], scale, mask=mask)
    else:  # columnwise scales of mxfp8_2d, the only ones that repeat across
        wide = tl.broadcast_to(scale[:, :, None], (BLOCK_ROWS, BLOCK_COLS, ACROSS))
        wide = tl.reshape(wide, (BLOCK_ROWS, BLOCK_COLS * ACROSS))
        wide_columns = first_col * ACROSS + tl.arange(0, BLOCK_COLS * ACROSS)[None, :]
        wide_mask = (rows[:, None] < block_rows) & (wide_columns < block_cols * ACROSS)
        for line in range(down):
            tl.store(target + line * target_stride + wide_columns, wide, mask=wide_mask)
