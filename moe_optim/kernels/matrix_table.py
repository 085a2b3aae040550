"""Tables of matrices as kernels read them, and parts of matrices, one per program."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optim.kernels.cutting import cut_ranges, grid, int64
from moe_optim.kernels.fields import MATRIX_FIELDS
from moe_optim.kernels.matrices import Piece
from moe_optim.kernels.plan import ALIGNMENT, BoundKernel
from moe_optim.kernels.tuning import FlatTile

_GRADIENT, _MOMENTUM, _SPAN, _GAP, _, _, _PACKED, _ = range(MATRIX_FIELDS)
"""Columns of MATRIX_FIELDS."""

PartKind = tuple[bool, bool, bool]
"""Properties that all parts of a launch share: whether the gradient is fp32; whether every part
lies within one group of rows; and whether every part begins, and every group ends, at multiples of
the widest access."""
_KIND = ("GRADIENT_FP32", "CONTIGUOUS", "ALIGNED")


def describe_state(pieces: Sequence[Piece], packed: Tensor | None = None) -> Tensor:
    """Describe gradients and momentum, and the batch [B, M, N] that they are packed into.

    Returns:
        Rows of MATRIX_FIELDS, see ``fields``, in the order of the pieces, with the elements of the
        matrix and the bytes of an element of its gradient behind each, int64 on the CPU.
    """
    tables = [_describe(one, one.shard.momentum, one.first, one.shard.gradient) for one in pieces]
    return _join(tables, packed)


def describe_weights(pieces: Sequence[Piece], weights: Tensor, packed: Tensor) -> Tensor:
    """Describe a batch, and the elements of the pieces' weights, [n], in place of momentum."""
    parts = weights.split([one.numel for one in pieces])
    tables = [_describe(one, part, 0, None) for one, part in zip(pieces, parts, strict=True)]
    return _join(tables, packed)


def cut_matrices(table: Tensor, length: int) -> tuple[dict[PartKind, Tensor], Tensor]:
    """Cut matrices into parts of ``length`` elements, in the order of the matrix.

    Returns:
        Rows of MATRIX_PART_FIELDS by kind, int64 on the CPU, and the bounds of matrices among the
        slots of parts, [num_matrices + 1] int64.
    """
    numels, sizes = table[:, MATRIX_FIELDS:].unbind(1)
    which, numbers, bounds = cut_ranges(numels, length)
    of_part = table[which]
    span, gap = of_part[:, _SPAN], of_part[:, _GAP]
    first = numbers * length
    count = (numels[which] - first).clamp(max=length)
    place = first + first // span * gap
    slot = torch.arange(len(which), device="cpu")
    parts = torch.stack([which, first, place, count, slot], 1)

    contiguous = (gap == 0) | (first // span == (first + count - 1) // span)
    steps = torch.where(contiguous, place, span | gap)
    addresses = of_part[:, _GRADIENT] | of_part[:, _MOMENTUM] | of_part[:, _PACKED]
    aligned = (addresses | steps) % ALIGNMENT == 0
    kinds = torch.stack([sizes[which] == torch.float32.itemsize, contiguous, aligned], 1)
    of_kind = {}
    for kind in kinds.unique(dim=0):
        is_fp32, is_contiguous, is_aligned = kind.tolist()
        of_kind[is_fp32, is_contiguous, is_aligned] = parts[(kinds == kind).all(1)]
    return of_kind, bounds


def bind_parts(
    kernel: Any,
    table: Tensor,
    parts: Mapping[PartKind, Tensor],
    tile: FlatTile,
    *arguments: Tensor,
    **constants: bool,
) -> Iterator[BoundKernel]:
    """Yield a launch per kind of parts, on the device of ``arguments``.

    ``arguments`` follow the tables of matrices and parts; ``constants`` do not depend on the kind.
    """
    device = arguments[0].device
    matrices = table[:, :MATRIX_FIELDS].contiguous().to(device)
    for kind, rows in parts.items():
        of_kind = {name: one for name, one in zip(_KIND, kind, strict=True)}
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


def _describe(piece: Piece, values: Tensor, first: int, gradient: Tensor | None) -> Tensor:
    """Return the rows of a piece that is not packed yet.

    ``values`` are momentum, or what is unpacked instead, flat; ``first`` is the place of the
    piece's first weight in them, and in ``gradient``.
    """
    shard, (_, rows, cols) = piece.shard, piece.shard.shape
    weight, taken = grid(range(piece.count), piece.taken).unbind(1)
    of_rows = int64([[one.first, one.span, one.stride, one.groups] for one in shard.rows])
    begin, span, stride, groups = of_rows[taken].unbind(1)
    offset = ((first + weight) * rows + begin) * cols
    start, size = (0, 0) if gradient is None else (gradient.data_ptr(), gradient.element_size())
    columns = [
        start + offset * size,
        values.data_ptr() + offset * values.element_size(),
        span * cols,
        torch.where(groups > 1, (stride - span) * cols, 0),
        torch.full_like(offset, shard.group),
        torch.full_like(offset, shard.norm),
        torch.zeros_like(offset),
        piece.start + (piece.first + weight) * len(shard.rows) + taken,
        span * groups * cols,
        torch.full_like(offset, size),
    ]
    return torch.stack(columns, 1)


def _join(tables: Sequence[Tensor], packed: Tensor | None) -> Tensor:
    nothing = torch.empty((0, MATRIX_FIELDS + 2), dtype=torch.int64, device="cpu")
    table = torch.cat([nothing, *tables])
    if packed is not None:
        nbytes = packed.shape[1] * packed.shape[2] * packed.element_size()
        table[:, _PACKED] = packed.data_ptr() + torch.arange(len(table), device="cpu") * nbytes
    return table
