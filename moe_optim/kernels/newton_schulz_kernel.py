# mypy: allow-incomplete-defs

"""Kernels of the Newton-Schulz iteration: products of matrices in batches.

Matrices are read and written through descriptors, in blocks: zeros are read outside of a matrix,
and what is written there is dropped. Sums are fp32, and are rounded once. A tile depends on its
matrix alone.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
"""Rows of tiles that programs take column by column, so that they share operands in L2."""


@triton.jit
def product_kernel(
    left,  # descriptor of [batch, rows, inner], or transposed; blocks of one tile
    right,  # descriptor of [batch, inner, cols], or transposed; blocks of one tile
    out,  # descriptor of [batch, rows, cols]; blocks of [TILE_ROWS, TILE_ROWS]
    batch,
    rows,
    cols,
    inner,
    LEFT_IS_TRANSPOSED: tl.constexpr,
    RIGHT_IS_TRANSPOSED: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    TILE_INNER: tl.constexpr,
):
    """Write out = left @ right; TILE_COLS is twice TILE_ROWS.

    If the result is symmetric, tiles that lie above the diagonal are not computed, and elements
    above it are copies of those below.

    Grid (number of multiprocessors,): while a program writes one tile, it reads the next.
    """
    tiles_down = tl.cdiv(rows, TILE_ROWS)
    if IS_SYMMETRIC:
        num_tiles = _count_tiles(tiles_down, 2)
    else:
        num_tiles = tiles_down * tl.cdiv(cols, TILE_COLS)
    for program in tl.range(tl.program_id(0), num_tiles * batch, tl.num_programs(0), flatten=True):
        matrix = program // num_tiles
        tile = program % num_tiles
        if IS_SYMMETRIC:
            down, across = _find_symmetric_tile(tile, 2)
        else:
            down, across = _find_tile(tile, tiles_down, tl.cdiv(cols, TILE_COLS))
        row = down * TILE_ROWS
        col = across * TILE_COLS
        sums = tl.zeros((TILE_ROWS, TILE_COLS), dtype=tl.float32)
        for start in tl.range(0, inner, TILE_INNER):
            sums = _add_product(
                sums, left, right, matrix, row, col, start, LEFT_IS_TRANSPOSED, RIGHT_IS_TRANSPOSED
            )
        first, second = sums.reshape(TILE_ROWS, 2, TILE_ROWS).permute(0, 2, 1).split()
        if IS_SYMMETRIC:
            _store_symmetric(out, first, matrix, row, col, rows)
            _store_symmetric(out, second, matrix, row, col + TILE_ROWS, rows)
        else:
            _store(out, first.to(out.dtype), matrix, row, col)
            _store(out, second.to(out.dtype), matrix, row, col + TILE_ROWS)


@triton.jit
def polynomial_kernel(
    squares,  # descriptor of [batch, rows, rows], symmetric; blocks of [TILE_ROWS, TILE_INNER]
    addend,  # descriptor of the same memory; blocks of [TILE_ROWS, TILE_ROWS]
    out,  # descriptor of [batch, rows, rows]; blocks of [TILE_ROWS, TILE_ROWS]
    rows,
    a,
    b,
    c,
    TILE_ROWS: tl.constexpr,
    TILE_INNER: tl.constexpr,
):
    """Write out = a I + b A + c A A for symmetric A, where c is not zero.

    Sums begin with b / c A. Tiles above the diagonal are not computed, and elements above it are
    copies of those below.

    Grid (number of tiles,): of two programs on a multiprocessor, one computes while the other reads
    its addend or writes.
    """
    num_tiles = _count_tiles(tl.cdiv(rows, TILE_ROWS), 1)
    matrix = tl.program_id(0) // num_tiles
    down, across = _find_symmetric_tile(tl.program_id(0) % num_tiles, 1)
    row = down * TILE_ROWS
    col = across * TILE_ROWS
    sums = addend.load([matrix, row, col]).reshape(TILE_ROWS, TILE_ROWS).to(tl.float32) * (b / c)
    for start in tl.range(0, rows, TILE_INNER):
        sums = _add_product(sums, squares, squares, matrix, row, col, start, False, True)
    places = tl.arange(0, TILE_ROWS)
    is_diagonal = places[:, None] + (row - col) == places[None, :]
    _store_symmetric(out, sums * c + tl.where(is_diagonal, a, 0.0), matrix, row, col, rows)


@triton.jit
def _count_tiles(tiles_down, WIDTH: tl.constexpr):
    """Count tiles, WIDTH times as wide as high, that the lower triangle touches."""
    whole = tiles_down // WIDTH
    return WIDTH * whole * (whole + 1) // 2 + tiles_down % WIDTH * (whole + 1)


@triton.jit
def _find_symmetric_tile(tile, WIDTH: tl.constexpr):
    """Return row and column of a tile: WIDTH rows of one tile, as many of two, and so on."""
    step = (tl.sqrt(8.0 * (tile // WIDTH).to(tl.float32) + 1.0) * 0.5 - 0.5).to(tl.int32)
    # The root is rounded
    step += (_count_tiles((step + 1) * WIDTH, WIDTH) <= tile).to(tl.int32)
    step -= (_count_tiles(step * WIDTH, WIDTH) > tile).to(tl.int32)
    rest = tile - _count_tiles(step * WIDTH, WIDTH)
    return step * WIDTH + rest // (step + 1), rest % (step + 1)


@triton.jit
def _find_tile(tile, tiles_down, tiles_across):
    """Return row and column of a tile, column by column in groups of rows."""
    group = tile // (GROUP * tiles_across)
    rest = tile % (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    return group * GROUP + rest % height, rest // height


@triton.jit
def _add_product(
    sums,
    left,
    right,
    matrix,
    row,
    col,
    start,
    LEFT_IS_TRANSPOSED: tl.constexpr,
    RIGHT_IS_TRANSPOSED: tl.constexpr,
):
    """Add the product of two blocks to a tile of sums."""
    if LEFT_IS_TRANSPOSED:
        first = left.load([matrix, start, row])
        first = first.reshape(first.shape[1], first.shape[2]).T
    else:
        first = left.load([matrix, row, start])
        first = first.reshape(first.shape[1], first.shape[2])
    if RIGHT_IS_TRANSPOSED:
        second = right.load([matrix, col, start])
        second = second.reshape(second.shape[1], second.shape[2]).T
    else:
        second = right.load([matrix, start, col])
        second = second.reshape(second.shape[1], second.shape[2])
    return tl.dot(first, second, sums)


@triton.jit
def _store_symmetric(out, sums, matrix, row, col, rows):
    """Store a square on or below the diagonal, and mirrored; drop one above, without a branch."""
    values = sums.to(out.dtype)
    places = tl.arange(0, values.shape[0])
    is_below = places[:, None] + (row - col) >= places[None, :]
    values = tl.where(is_below, values, values.T)
    outside = tl.where(col <= row, 0, rows)
    _store(out, values, matrix, row + outside, col)
    _store(out, values.T, matrix, col + outside, row)


@triton.jit
def _store(out, values, matrix, row, col):
    out.store([matrix, row, col], values.reshape(1, values.shape[0], values.shape[1]))
