"""Tile sizes, measured once and frozen: tuning at run time would make ranks diverge in time."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """The rectangle of a weight that one program handles: some columns of a block row."""

    cols: int
    """Columns, a power of two and a multiple of the block."""
    num_warps: int
    rows: int | None = None
    """Rows that are in registers at a time; all of the block row if not given."""
    registers: int | None = None
    """Limit of registers a thread, where the compiler would take too many for enough programs to
    run at a time."""


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
    }
)
"""By format and dtype of the source, on H100; docs/kernel-measurements.md has what was tried."""


STEP_TILES: Mapping[tuple[str, torch.dtype], Tile] = MappingProxyType(
    {
        ("mxfp8", torch.float32): Tile(cols=128, num_warps=8),
        ("mxfp8", torch.bfloat16): Tile(cols=128, num_warps=4, registers=168),
        ("mxfp8_2d", torch.float32): Tile(cols=64, num_warps=4),
        ("mxfp8_2d", torch.bfloat16): Tile(cols=128, num_warps=4, registers=168),
        ("fp8_block", torch.float32): Tile(cols=128, num_warps=8, rows=64),
        ("fp8_block", torch.bfloat16): Tile(cols=128, num_warps=4, rows=32),
    }
)
"""The same where a step of Adam comes first, by format and dtype of the moments, on H200. Of 65,536
registers three programs of four warps take 168 a thread."""

ADAM_TILE = Tile(cols=1024, num_warps=8)
"""Elements of a flat range that one program steps at a time."""
ADAM_PART = 8192
"""Elements of a flat range that one program steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransposeTile:
    """Rectangle that one program transposes: four-byte words, and packs of rows that fill one."""

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
"""By elements a word; 1 for rows of bytes that do not begin at multiples of four."""

SCALE_TILES: Mapping[bool, tuple[int, int]] = MappingProxyType({False: (64, 64), True: (16, 64)})
"""Block scales, down and across, that one program writes, by whether they have several lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormTile:
    """Gradients that one program reads to sum their squares."""

    numel: int
    """Elements at a time, a power of two; each has a sum of its own in registers."""
    num_tiles: int
    """Tiles of a part, which is what one program sums."""
    num_warps: int


NORM: Mapping[torch.dtype, NormTile] = MappingProxyType(
    {
        torch.float32: NormTile(numel=2048, num_tiles=64, num_warps=8),
        torch.bfloat16: NormTile(numel=2048, num_tiles=64, num_warps=8),
    }
)
"""By dtype of the gradients, on H200: parts of 512 and of 256 KiB."""

NORM_LANES = 1024
"""Sums of parts that one program adds up at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatTile:
    """Flat range of an expert that one program handles at a time."""

    numel: int
    """Elements, a power of two."""
    num_warps: int


AMAX_TILE = 4096
"""Elements: a part whose amax one program finds is a multiple of it."""
GAP_TILE = 4096
"""Two-byte units that one program zeroes outside the members."""

EXPERT_AMAX = FlatTile(numel=1024, num_warps=4)
"""Amax of an expert, four tiles in flight; a divisor of ``AMAX_TILE``. On H200."""

FAKE_FORWARD = FlatTile(numel=2048, num_warps=4)
"""Fake quantization: values to values."""
FAKE_BACKWARD = FlatTile(numel=2048, num_warps=4)
"""Backward pass of fake quantization: values and gradients to gradients."""

TENSORWISE_TILE = FlatTile(numel=8192, num_warps=8)
"""Elements of a tensorwise weight that are read at a time. On H200, as fast as a copy."""
TENSORWISE_PART = 1 << 15
"""Elements that one program reads, a multiple of the tile."""
TENSORWISE_LANES = 128
"""Maxima of parts that one program compares at a time."""

HEALTH_TILE = Tile(cols=128, num_warps=1, rows=4)
"""Columns that one program measures, four a thread: the sums of a column stay in one thread."""
HEALTH_ROWS = 256
"""Rows that one program measures, a multiple of every block row."""
