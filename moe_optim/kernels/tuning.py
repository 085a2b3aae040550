"""Tile sizes, measured offline: autotuning at run time would desynchronize ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Rectangle of a weight per program: some columns of a block row, or of several rows."""

    cols: int
    """Columns, a power of two and a multiple of the block."""
    num_warps: int
    rows: int | None = None
    """Rows held in registers at a time, by default the whole block row. Of row-only formats, whose
    block row is one row, the rows of a tile, at most ``ROW_TILE_ROWS``."""
    registers: int | None = None
    """Maximum registers per thread, where the compiler's choice would limit occupancy."""


ROW_TILE_ROWS = 64
"""Most rows of a tile of row-only formats."""

TILES: Mapping[tuple[str, torch.dtype], Tile] = MappingProxyType(
    {
        ("mxfp8", torch.float32): Tile(cols=128, num_warps=2),
        ("mxfp8", torch.bfloat16): Tile(cols=128, num_warps=2),
        ("mxfp8_2d", torch.float32): Tile(cols=256, num_warps=4),
        ("mxfp8_2d", torch.bfloat16): Tile(cols=256, num_warps=2),
        ("nvfp4", torch.float32): Tile(cols=128, num_warps=1),
        ("nvfp4", torch.bfloat16): Tile(cols=128, num_warps=1),
        ("fp8_block", torch.float32): Tile(cols=128, num_warps=4),
        ("fp8_block", torch.bfloat16): Tile(cols=128, num_warps=4),
        ("fp8_block_fp32", torch.float32): Tile(cols=128, num_warps=4),
        ("fp8_block_fp32", torch.bfloat16): Tile(cols=128, num_warps=4),
        ("mxfp8_rows", torch.float32): Tile(cols=256, num_warps=4, rows=16),
        ("mxfp8_rows", torch.bfloat16): Tile(cols=256, num_warps=4, rows=16),
        ("mxfp4", torch.float32): Tile(cols=256, num_warps=1, rows=4),
        ("mxfp4", torch.bfloat16): Tile(cols=256, num_warps=4, rows=16),
        ("nvfp4_rows", torch.float32): Tile(cols=256, num_warps=1, rows=4),
        ("nvfp4_rows", torch.bfloat16): Tile(cols=256, num_warps=2, rows=4),
        ("int4", torch.float32): Tile(cols=256, num_warps=2, rows=8),
        ("int4", torch.bfloat16): Tile(cols=256, num_warps=1, rows=4),
        ("int4_g128", torch.float32): Tile(cols=256, num_warps=2, rows=8),
        ("int4_g128", torch.bfloat16): Tile(cols=256, num_warps=1, rows=4),
    }
)
"""Tiles by format and source dtype, measured on H100; see docs/kernel-measurements.md."""


UPDATE_TILES: Mapping[tuple[str, torch.dtype | None], Tile] = MappingProxyType(
    {
        ("mxfp8", torch.float32): Tile(cols=128, num_warps=8),
        ("mxfp8", torch.bfloat16): Tile(cols=128, num_warps=4, registers=168),
        ("mxfp8_2d", torch.float32): Tile(cols=64, num_warps=4),
        ("mxfp8_2d", torch.bfloat16): Tile(cols=128, num_warps=4, registers=168),
        ("fp8_block", torch.float32): Tile(cols=128, num_warps=8, rows=64),
        ("fp8_block", torch.bfloat16): Tile(cols=128, num_warps=4, rows=32),
        ("fp8_block_fp32", torch.float32): Tile(cols=128, num_warps=8, rows=64),
        ("fp8_block_fp32", torch.bfloat16): Tile(cols=128, num_warps=4, rows=32),
        ("mxfp8", None): Tile(cols=256, num_warps=4),
        ("mxfp8_2d", None): Tile(cols=256, num_warps=4),
        ("fp8_block", None): Tile(cols=256, num_warps=8, rows=64),
        ("fp8_block_fp32", None): Tile(cols=256, num_warps=8, rows=64),
        **{
            (name, moments): Tile(cols=256, num_warps=4, rows=4)
            for name in ("mxfp8_rows", "mxfp4", "int4", "int4_g128")
            for moments in (torch.float32, torch.bfloat16, None)
        },
    }
)
"""Tiles with a fused update, by format and moment dtype, measured on H200; None for a direction,
and row-only formats, measured on H100. With 168 registers per thread, three programs of four warps
fit in 65,536 registers."""

RANGE_TILE = Tile(cols=1024, num_warps=8)
"""Elements of a flat range that one program updates at a time."""
RANGE_PART = 8192
"""Elements of a flat range per program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransposeTile:
    """Rectangle that one program transposes, in 32-bit words."""

    words: int
    """Words along a row of the source."""
    packs: int
    """Words along a row of the copy."""
    num_warps: int


TRANSPOSE: Mapping[int, TransposeTile] = MappingProxyType(
    {
        1: TransposeTile(words=64, packs=64, num_warps=4),
        4: TransposeTile(words=64, packs=64, num_warps=4),
        8: TransposeTile(words=32, packs=64, num_warps=8),
    }
)
"""Tiles by elements per word; 1 for rows of bytes that are not word-aligned."""

SCALE_TILES: Mapping[bool, tuple[int, int]] = MappingProxyType({False: (64, 64), True: (16, 64)})
"""Block scales, down and across, per program, by whether they repeat over several lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormTile:
    """Gradients that one program reads to sum their squares."""

    numel: int
    """Elements per tile, a power of two; registers hold one sum per element."""
    num_tiles: int
    """Tiles per part; a program sums one part."""
    num_warps: int


NORM: Mapping[torch.dtype, NormTile] = MappingProxyType(
    {
        torch.float32: NormTile(numel=2048, num_tiles=64, num_warps=8),
        torch.bfloat16: NormTile(numel=2048, num_tiles=64, num_warps=8),
    }
)
"""Tiles by gradient dtype, measured on H200: parts of 512 and 256 KiB."""

NORM_LANES = 1024
"""Part sums that one program adds at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatTile:
    """Flat range of elements that one program handles at a time."""

    numel: int
    """Elements, a power of two."""
    num_warps: int


AMAX_TILE = 4096
"""Elements; the length of an amax part is a multiple of it."""
GAP_TILE = 4096
"""Two-byte units of a gap that one program zeroes."""

EXPERT_AMAX = FlatTile(numel=1024, num_warps=4)
"""Tile for the amax of an expert, four in flight; divides ``AMAX_TILE``. Measured on H200."""

FAKE_FORWARD = FlatTile(numel=2048, num_warps=4)
FAKE_BACKWARD = FlatTile(numel=2048, num_warps=4)
FAKE_BLOCKS = FlatTile(numel=2048, num_warps=4)
"""A multiple of the largest block."""
FAKE_AMAX = FlatTile(numel=2048, num_warps=4)

DEQUANTIZE: Mapping[int, Tile] = MappingProxyType(
    {1: Tile(cols=256, num_warps=8, rows=16), 2: Tile(cols=256, num_warps=4, rows=32)}
)
"""Tiles of data as it is stored, by elements per byte; measured on H100."""
DEQUANTIZE_TRANSPOSED = Tile(cols=32, num_warps=2, rows=64)
"""Tile of data that is stored transposed; measured on H100."""

TENSORWISE_TILE = FlatTile(numel=8192, num_warps=8)
"""Tile for the per-tensor cast; on H200 it reaches the bandwidth of a copy."""
TENSORWISE_PART = 1 << 15
"""Elements per program, a multiple of the tile."""
TENSORWISE_LANES = 128
"""Part maxima that one program compares at a time."""

HEALTH_TILE = Tile(cols=128, num_warps=1, rows=4)
"""Columns that one program measures, four per thread, so that one thread holds a column's sums."""
HEALTH_ROWS = 256
"""Rows that one program measures, a multiple of every block row."""

MOMENTUM_TILE = FlatTile(numel=2048, num_warps=8)
"""Elements of a matrix whose momentum one program updates at a time, and as many sums in fp64.
Measured on H100, where tiles of 512 to 4,096 elements differ by 3%."""
MOMENTUM_PART = 1 << 15
"""Elements per program, a multiple of the tile. Tile, part and lanes define the order of sums."""
MOMENTUM_LANES = 128
"""Part sums that one program adds at a time."""
PACK_TILE = FlatTile(numel=2048, num_warps=8)
"""Elements of a matrix that one program divides by the norm, or moves, at a time.
Measured on H100."""
PACK_PART = 1 << 14
"""Elements per program, a multiple of the tile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTile:
    """Tile of a product of matrices that one program computes at a time."""

    rows: int
    cols: int
    """Columns of the product, as many as rows or twice as many."""
    inner: int
    """Elements of a row that a program multiplies between two reads."""
    num_warps: int
    num_stages: int
    """Reads in flight."""


PRODUCT_TILES: Mapping[bool, ProductTile] = MappingProxyType(
    {
        False: ProductTile(rows=128, cols=256, inner=64, num_warps=8, num_stages=4),
        True: ProductTile(rows=128, cols=256, inner=64, num_warps=8, num_stages=3),
    }
)
"""Tiles of Newton-Schulz products, by whether they are symmetric, measured on H100. A tile of 256
columns reads shared memory less often; a mirrored copy leaves room for three stages."""

POLYNOMIAL_TILE = ProductTile(rows=128, cols=128, inner=64, num_warps=4, num_stages=3)
"""Tile of a polynomial, measured on H100; two programs fit on a multiprocessor."""
