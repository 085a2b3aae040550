"""Tile sizes, measured once and frozen: tuning at run time would make ranks diverge in time."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

BLOCK = 32
"""Elements of an MXFP8 block, and rows of a tile: a tile holds whole blocks of both directions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """The rectangle of a weight that one program handles: ``BLOCK`` rows of some columns."""

    cols: int
    """Columns, a power of two and a multiple of ``BLOCK``."""
    num_warps: int


REQUANTIZE_MXFP8: Mapping[torch.dtype, Tile] = MappingProxyType(
    {
        torch.float32: Tile(cols=128, num_warps=2),
        torch.bfloat16: Tile(cols=128, num_warps=2),
    }
)
"""By dtype of the source, as measured on H100; README.md beside this says against what."""
