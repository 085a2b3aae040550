"""Shapes and shards of expert weights for benchmarks.

Every expert is a separate member. A rank that owns 1/N of the weights owns the first rows of each,
in whole block rows (at least one), so that no block depends on other ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_optim.formats import BlockScaledFormat


TENSORWISE = "tensorwise"
"""Megatron's name of FP8 with per-tensor scaling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeSet:
    """Expert weights of one rank."""

    weights: tuple[tuple[int, int, int], ...]
    """Experts, rows and columns of each weight of a layer."""
    layers: int

    @property
    def members(self) -> list[tuple[int, int]]:
        """Rows and columns of every expert."""
        layer = [(rows, cols) for experts, rows, cols in self.weights for _ in range(experts)]
        return layer * self.layers


_QWEN3 = ((16, 1536, 2048), (16, 2048, 768))  # 128 experts over 8 ranks
_DEEPSEEK = ((4, 4096, 7168), (4, 7168, 2048))  # 256 experts over 64 ranks
_TINY = ((6, 256, 128), (6, 128, 256))

SHAPE_SETS: Mapping[str, ShapeSet] = MappingProxyType(
    {
        "w1": ShapeSet(weights=_QWEN3, layers=8),
        # All layers: 3.6e9 parameters, 22 GB with masters, 37 GB with Transformer Engine's.
        "qwen3-30b-a3b": ShapeSet(weights=_QWEN3, layers=48),
        "deepseek-v3": ShapeSet(weights=_DEEPSEEK, layers=4),  # 58 over 16 pipeline stages
        "few": ShapeSet(weights=_TINY, layers=1),
        "many": ShapeSet(weights=_TINY, layers=1024),
        "small": ShapeSet(weights=((2, 256, 128), (2, 128, 256)), layers=2),
    }
)

MODELS: Mapping[str, ShapeSet] = MappingProxyType(
    {
        # 12 of 48 layers: 7.2e9 parameters
        "qwen3-30b-a3b": ShapeSet(weights=((128, 1536, 2048), (128, 2048, 768)), layers=12),
        "small": ShapeSet(weights=((4, 256, 128), (4, 128, 256)), layers=2),
    }
)
"""All experts of each layer, to be distributed over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned(ABC):
    """Weights and the share that a rank owns."""

    shape_set: str
    shard: int
    """Reciprocal of the owned share of every weight."""
    device: str

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the format."""

    @property
    @abstractmethod
    def owned(self) -> list[int]:
        """Owned elements of every expert."""

    @property
    def label(self) -> str:
        """Name of the shape set, with its number of layers."""
        layers = SHAPE_SETS[self.shape_set].layers
        return f"{self.shape_set}, {layers} layer{'s' * (layers > 1)}"

    @property
    def members(self) -> list[tuple[int, int]]:
        """Rows and columns of every expert."""
        return SHAPE_SETS[self.shape_set].members


@dataclass(frozen=True, kw_only=True, slots=True)
class Case(Owned):
    """Weights in one format, owned in whole blocks."""

    format: "BlockScaledFormat"

    @property
    def name(self) -> str:
        """Name of the format."""
        return self.format.name

    @property
    def owned(self) -> list[int]:
        """Owned elements of every expert."""
        return [owned_rows(self.format, rows, self.shard) * cols for rows, cols in self.members]


@dataclass(frozen=True, kw_only=True, slots=True)
class OneScaleCase(Owned):
    """FP8 weights with per-tensor scaling, owned in whole rows."""

    @property
    def name(self) -> str:
        """Megatron's name of the format."""
        return TENSORWISE

    @property
    def owned(self) -> list[int]:
        """Owned elements of every expert."""
        return [max(1, rows // self.shard) * cols for rows, cols in self.members]


def owned_rows(format: "BlockScaledFormat", rows: int, shard: int) -> int:
    """Return the owned rows of a weight: all, or 1/shard in whole block rows."""
    if shard == 1:
        return rows
    return min(rows, max(1, rows // shard // format.block_row_height) * format.block_row_height)
