"""Rows of whole weights, and of weights that hold gate and up."""

import torch
from torch import Tensor

from moe_optim.kernels.matrices import MatrixRows, split_rows


def whole_rows(rows: int) -> tuple[MatrixRows, ...]:
    """Return the rows of one matrix."""
    return split_rows(rows, (rows,))


def gate_and_up(rows: int, interleave: int | None) -> tuple[MatrixRows, ...]:
    """Return the rows of gate and up, halves of a weight or alternating in blocks of rows."""
    return split_rows(rows, (interleave or rows // 2,) * 2)


def indices_of(rows: MatrixRows) -> Tensor:
    """Return the rows of a weight in the order of a matrix, int64 on the CPU."""
    starts = range(rows.first, rows.first + rows.groups * rows.stride, rows.stride)
    return torch.tensor([start + row for start in starts for row in range(rows.span)])
