"""Tables of matrices as kernels read them, and parts of matrices, one per program."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_optim.kernels.cutting import cut_ranges, grid, int64
from moe_optim.kernels.fields import MATRIX_FIELDS
from moe_optim.kernels.matrices import Piece
from moe_optim.kernels.plan import ALIGNMENT, BoundKernel
from moe_optim.kernels.tuning import FlatTile

_GRADIENT, _MOMENTUM, _SPAN, _GAP, _, _, _PACKED, _ = range(MATRIX_FIELDS)
"""Columns of MATRIX_FIELDS."""


class PartKind(NamedTuple):
    """Properties that all parts of a launch share."""

    gradient_size: int
    """Bytes of an element of the gradient."""
    contiguous: bool
    """Whether every part lies within one group of rows."""
    aligned: bool
    """Whether every part begins, and every group ends, at multiples of the widest access."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixTable:
    """Matrices of several pieces, in the order of the pieces."""

    rows: Tensor
    """Rows of MATRIX_FIELDS, see ``fields``, [num_matrices, MATRIX_FIELDS] int64 on the CPU."""
    numels: Tensor
    """Elements of each matrix, [num_matrices] int64 on the CPU."""
    gradient_sizes: Tensor
    """Bytes of an element of each gradient, [num_matrices] int64 on the CPU."""

    @classmethod
    def of_state(cls, pieces: Sequence[Piece], packed: Tensor | None = None) -> "MatrixTable":
        """Describe gradients and momentum, and the batch [B, M, N] that they are packed into."""
        tables = [
            _describe(
                one,
                gradient=_Memory(one.shard.gradient.data_ptr(), one.shard.gradient.element_size()),
                momentum=_Memory(one.shard.momentum.data_ptr(), one.shard.momentum.element_size()),
                first=one.first,
            )
            for one in pieces
        ]
        return cls._join(tables, packed)

    @classmethod
    def of_weights(cls, pieces: Sequence[Piece], weights: Tensor, packed: Tensor) -> "MatrixTable":
        """Describe a batch, and the elements of the pieces' weights, [n], in place of momentum."""
        tables, place, size = [], weights.data_ptr(), weights.element_size()
        for one in pieces:
            memory = _Memory(place, size)
            tables.append(_describe(one, gradient=_Memory(0, 0), momentum=memory, first=0))
            place += one.numel * size
        return cls._join(tables, packed)

    @classmethod
    def _join(cls, tables: Sequence[Tensor], packed: Tensor | None) -> "MatrixTable":
        nothing = torch.empty((0, MATRIX_FIELDS + 2), dtype=torch.int64, device="cpu")
        table = torch.cat([nothing, *tables])
        if packed is not None:
            nbytes = packed.shape[1] * packed.shape[2] * packed.element_size()
            table[:, _PACKED] = packed.data_ptr() + torch.arange(len(table), device="cpu") * nbytes
        numels, sizes = table[:, MATRIX_FIELDS:].unbind(1)
        rows = table[:, :MATRIX_FIELDS].contiguous()
        return cls(rows=rows, numels=numels, gradient_sizes=sizes)

    def cut(self, length: int) -> tuple[dict[PartKind, Tensor], Tensor]:
        """Cut matrices into parts of ``length`` elements, in the order of the matrix.

        Returns:
            Rows of MATRIX_PART_FIELDS by kind, int64 on the CPU, and the bounds of matrices among
            the slots of parts, [num_matrices + 1] int64.
        """
        which, numbers, bounds = cut_ranges(self.numels, length)
        of_part = self.rows[which]
        span, gap = of_part[:, _SPAN], of_part[:, _GAP]
        first = numbers * length
        count = (self.numels[which] - first).clamp(max=length)
        place = first + first // span * gap
        slot = torch.arange(len(which), device="cpu")
        parts = torch.stack([which, first, place, count, slot], 1)

        contiguous = (gap == 0) | (first // span == (first + count - 1) // span)
        steps = torch.where(contiguous, place, span | gap)
        addresses = of_part[:, _GRADIENT] | of_part[:, _MOMENTUM] | of_part[:, _PACKED]
        aligned = (addresses | steps) % ALIGNMENT == 0
        kinds = torch.stack([self.gradient_sizes[which], contiguous, aligned], 1)
        of_kind: dict[PartKind, Tensor] = {}
        for kind in kinds.unique(dim=0):
            size, is_contiguous, is_aligned = kind.tolist()
            key = PartKind(size, bool(is_contiguous), bool(is_aligned))
            of_kind[key] = parts[(kinds == kind).all(1)]
        return of_kind, bounds

    def bind(
        self,
        kernel: Any,
        parts: Mapping[PartKind, Tensor],
        tile: FlatTile,
        *arguments: Tensor,
        **constants: bool,
    ) -> Iterator[BoundKernel]:
        """Yield a launch per kind of parts, on the device of ``arguments``.

        ``arguments`` follow the tables of matrices and parts; ``constants`` do not depend on the
        kind.
        """
        device = arguments[0].device
        matrices = self.rows.to(device)
        for kind, rows in parts.items():
            of_kind = {
                "GRADIENT_FP32": kind.gradient_size == torch.float32.itemsize,
                "CONTIGUOUS": kind.contiguous,
                "ALIGNED": kind.aligned,
            }
            yield BoundKernel(
                kernel,
                len(rows),
                matrices,
                rows.to(device),
                *arguments,
                **{name: value for name, value in of_kind.items() if name in kernel.arg_names},
                **constants,
                TILE=tile.numel,
                num_warps=tile.num_warps,
            )


class _Memory(NamedTuple):
    address: int
    size: int
    """Bytes of an element."""


def _describe(piece: Piece, *, gradient: _Memory, momentum: _Memory, first: int) -> Tensor:
    """Return the rows of a piece, not packed yet, with numel and size of a gradient behind each.

    ``first`` is the place of the piece's first weight in both memories.
    """
    shard, (_, rows, cols) = piece.shard, piece.shard.shape
    weight, taken = grid(range(piece.last - piece.first), piece.taken).unbind(1)
    of_rows = int64([[one.first, one.span, one.stride, one.groups] for one in shard.rows])
    begin, span, stride, groups = of_rows[taken].unbind(1)
    offset = ((first + weight) * rows + begin) * cols
    columns = [
        gradient.address + offset * gradient.size,
        momentum.address + offset * momentum.size,
        span * cols,
        torch.where(groups > 1, (stride - span) * cols, 0),
        torch.full_like(offset, shard.group),
        torch.full_like(offset, shard.norm),
        torch.zeros_like(offset),
        piece.start + (piece.first + weight) * len(shard.rows) + taken,
        span * groups * cols,
        torch.full_like(offset, gradient.size),
    ]
    return torch.stack(columns, 1)
