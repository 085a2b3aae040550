"""Matrices that Muon orthogonalizes: rows of a weight, and the weights that a rank owns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.kernels.plan import require_flat

LARGEST = 2**31 - 1
"""Largest number of elements of one weight, whose offsets are int32 in kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRows:
    """Rows of a weight [R, C] that form one matrix, in order: groups at equal distances."""

    first: int
    """First row."""
    span: int
    """Consecutive rows in a group."""
    stride: int
    """Rows from the beginning of one group to the next."""
    groups: int
    """Number of groups."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.span * self.groups

    def view(self, weights: Tensor) -> Tensor:
        """Return the matrix of each weight as a view, [count, groups, span, C].

        Args:
            weights: values of the weights, [count, R, C], contiguous.
        """
        count, rows, cols = weights.shape
        return weights.as_strided(
            (count, self.groups, self.span, cols),
            (rows * cols, self.stride * cols, cols, 1),
            weights.storage_offset() + self.first * cols,
        )


def split_rows(rows: int, split: Sequence[int]) -> tuple[MatrixRows, ...]:
    """Return the rows of the matrices that lie in one weight, [rows, C].

    The weight repeats ``split[0]`` rows of the first matrix, ``split[1]`` of the second, and so on:
    query, key and value of each query group, as in Megatron's SelfAttention, or blocks of gate and
    up.

    Raises:
        LayoutError: rows that are not whole repeats.
    """
    stride = sum(split)
    if not split or min(split) < 1 or rows < 1 or rows % stride:
        raise LayoutError(
            "matrices of a weight: expected rows in multiples of the sum of a positive split, got "
            f"{rows} rows and the split {list(split)}. Orthogonalize the weight as one matrix, or "
            "set the interleave size with which it was built."
        )
    return tuple(
        MatrixRows(first=end - span, span=span, stride=stride, groups=rows // stride)
        for span, end in zip(split, accumulate(split), strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixShard:
    """Whole weights of one parameter that a rank owns."""

    parameter: str
    """Name, for errors."""
    gradient: Tensor
    """Reduced gradient, [n] fp32 or bf16, contiguous."""
    momentum: Tensor
    """Momentum, [n] fp32, contiguous."""
    shape: tuple[int, int, int]
    """Number of weights, and rows and columns of each; their product is n."""
    rows: tuple[MatrixRows, ...]
    """Matrices of each weight, see :func:`split_rows`."""
    group: int
    """Row of the hyper-parameters."""
    norm: int
    """Index of the clip factor."""

    @property
    def num_matrices(self) -> int:
        """Matrices of all weights."""
        return self.shape[0] * len(self.rows)

    def check(self) -> None:
        """Raise LayoutError unless tensors have the stated shapes."""
        where = f"Muon: {self.parameter}"
        count, rows, cols = self.shape
        if min(self.shape) < 1 or rows * cols > LARGEST:
            raise LayoutError(
                f"{where}: expected weights of 1 to {LARGEST} elements, got {count} of {rows} x "
                f"{cols}. Leave the parameter to the scalar optimizer."
            )
        device, numel = self.momentum.device, count * rows * cols
        dtypes = [torch.float32, torch.bfloat16]
        require_flat(f"{where}: gradient", self.gradient, numel, dtypes, device)
        require_flat(f"{where}: momentum", self.momentum, numel, dtypes[:1], device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Consecutive weights of a shard, and the matrices of each to take."""

    shard: MatrixShard
    index: int
    """Index of the shard among all."""
    first: int
    """First weight."""
    last: int
    """End (exclusive) of the weights."""
    rows: int | None = None
    """Index into ``shard.rows``; None for all matrices of each weight, in their order."""
    start: int = 0
    """Index of the shard's first matrix in :attr:`Momentum.squares`."""

    @property
    def taken(self) -> range:
        """Indices into ``shard.rows``."""
        if self.rows is None:
            return range(len(self.shard.rows))
        return range(self.rows, self.rows + 1)

    @property
    def count(self) -> int:
        """Number of weights."""
        return self.last - self.first

    @property
    def num_matrices(self) -> int:
        """Matrices of the piece."""
        return self.count * len(self.taken)

    @property
    def numel(self) -> int:
        """Elements of all its weights, those of other matrices included."""
        return self.count * self.shard.shape[1] * self.shard.shape[2]

    def view(self, values: Tensor, rows: int) -> Tensor:
        """Return matrix ``rows`` of each weight as a view, [count, groups, span, C].

        Args:
            values: elements of the weights, [numel], contiguous.
            rows: index into ``shard.rows``.
        """
        shape = (self.count, *self.shard.shape[1:])
        return self.shard.rows[rows].view(values.view(shape))
