"""Plans around the iteration of a Muon step: momentum, packing into batches, and unpacking."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from moe_optim.formats.reference.newton_schulz import EPS
from moe_optim.kernels.matrices import MatrixShard, Piece
from moe_optim.kernels.matrix_table import (
    bind_parts,
    cut_matrices,
    describe_state,
    describe_weights,
)
from moe_optim.kernels.plan import Backend, BoundKernel, Call, Plan, takes_kernels
from moe_optim.kernels.tuning import (
    MOMENTUM_LANES,
    MOMENTUM_PART,
    MOMENTUM_TILE,
    PACK_PART,
    PACK_TILE,
)

_CHUNK = 1 << 20
"""Elements whose fp64 squares plain torch holds at a time, or one matrix."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Momentum(Plan):
    """Plan that updates momentum in place and sums the squares of directions. See :meth:`build`.

    A launch computes, with ``momentum`` the first and ``1 - momentum`` the second column of a
    shard's row of hyper-parameters::

        g = clip * gradient
        m = lerp(m, g, 1 - momentum)
        u = lerp(g, m, momentum)      without Nesterov: m

    It writes ``m`` and the sums of ``u^2``. With a negative clip factor ``u`` is ``m``, which does
    not change. Bits depend on the values and the shape of each matrix only, on a GPU as on a CPU.
    """

    shards: tuple[MatrixShard, ...]
    """All shards."""
    squares: Tensor
    """Sum of squares of each matrix, [num_matrices] fp64, by shard, weight, and rows."""
    starts: tuple[int, ...]
    """Index of the first matrix of each shard."""
    hyper: Tensor
    """Hyper-parameters, [num_groups, HYPER_FIELDS] fp32, filled by the caller before each step."""
    clips: Tensor
    """Clip factors of the gradients, [num_norms] fp32, filled by the caller before each step."""
    nesterov: bool
    has_kernels: bool
    """Whether kernels run rather than plain torch."""

    @classmethod
    def build(
        cls,
        shards: Sequence[MatrixShard],
        hyper: Tensor,
        clips: Tensor,
        *,
        nesterov: bool,
        backend: Backend = "auto",
    ) -> "Momentum":
        """Plan the update of shards on the device of the hyper-parameters, without copying.

        ``hyper``, [num_groups, HYPER_FIELDS] fp32, and ``clips``, factors of gradients [num_norms]
        fp32, are read at every launch. LayoutError for shards whose tensors do not have the
        promised shape.
        """
        device = hyper.device
        for shard in shards:
            shard.check()
        *starts, total = accumulate((shard.num_matrices for shard in shards), initial=0)
        squares = torch.zeros(total, dtype=torch.float64, device=device)
        pieces = [
            Piece(shard=shard, index=index, first=0, last=shard.shape[0], start=start)
            for index, (shard, start) in enumerate(zip(shards, starts, strict=True))
        ]
        calls: tuple[Call, ...] = tuple(
            partial(_update, piece, hyper, clips, squares, nesterov) for piece in pieces
        )
        if has_kernels := takes_kernels(backend, device, e4m3=False):
            calls = tuple(_bind_momentum(pieces, hyper, clips, squares, nesterov))
        return cls(
            device=device,
            calls=calls,
            shards=tuple(shards),
            squares=squares,
            starts=tuple(starts),
            hyper=hyper,
            clips=clips,
            nesterov=nesterov,
            has_kernels=has_kernels,
        )

    def piece(
        self, shard: int, first: int = 0, last: int | None = None, rows: int | None = None
    ) -> Piece:
        """Return weights ``first`` to ``last`` of the shard with index ``shard``.

        ``rows`` selects one matrix of each weight; None takes all.
        """
        of, start = self.shards[shard], self.starts[shard]
        end = of.shape[0] if last is None else last
        return Piece(shard=of, index=shard, first=first, last=end, rows=rows, start=start)

    def plan_pack(self, pieces: Sequence[Piece], packed: Tensor) -> Plan:
        """Plan what follows the momentum: directions, divided by their norms, go to a batch.

        With ``m`` the updated momentum::

            u = lerp(clip * gradient, m, momentum)      without Nesterov or with a negative clip: m
            x = u / max(sqrt(sum of u^2), 1e-7)

        ``pieces`` are matrices of one shape, whose gradients still hold what the momentum was
        updated with; matrix b of ``packed``, [B, M, N] bf16, fp16 or fp32, contiguous, is their
        b-th. All tensors are read at every launch.
        """
        calls: tuple[Call, ...] = (partial(self._pack, pieces, packed),)
        if self.has_kernels:
            from moe_optim.kernels.momentum_kernel import pack_kernel

            table = describe_state(pieces, packed)
            parts, _ = cut_matrices(table, PACK_PART)
            arguments = (table, parts, PACK_TILE, self.hyper, self.clips, self.squares, packed)
            calls = tuple(bind_parts(pack_kernel, *arguments, NESTEROV=self.nesterov))
        return Plan(device=self.device, calls=calls)

    def plan_unpack(self, packed: Tensor, pieces: Sequence[Piece], weights: Tensor) -> Plan:
        """Plan the inverse of :meth:`plan_pack`'s permutation of rows.

        It writes the elements of the pieces' weights, one piece after the other, [n] of the batch's
        dtype, contiguous. Rows of other matrices are not written.
        """
        calls: tuple[Call, ...] = (partial(_unpack, packed, pieces, weights),)
        if self.has_kernels:
            from moe_optim.kernels.momentum_kernel import unpack_kernel

            table = describe_weights(pieces, weights, packed)
            parts, _ = cut_matrices(table, PACK_PART)
            calls = tuple(bind_parts(unpack_kernel, table, parts, PACK_TILE, packed))
        return Plan(device=self.device, calls=calls)

    def _pack(self, pieces: Sequence[Piece], packed: Tensor) -> None:
        for piece, batches in _batches_of(packed, pieces):
            shard = piece.shard
            row, clip = self.hyper[shard.group], self.clips[shard.norm]
            numel = shard.shape[1] * shard.shape[2]
            owned = slice(piece.first * numel, piece.last * numel)
            direction = _direction_of(shard, owned, row, clip, self.nesterov)
            per_weight = self.squares[piece.start : piece.start + shard.num_matrices]
            per_weight = per_weight.view(shard.shape[0], -1)[piece.first : piece.last]
            for index, target in zip(piece.taken, batches, strict=True):
                norms = per_weight[:, index].sqrt().float().clamp_min(EPS)
                matrices = piece.view(direction, index) / norms[:, None, None, None]
                target.copy_(matrices.reshape(target.shape))


def _unpack(packed: Tensor, pieces: Sequence[Piece], weights: Tensor) -> None:
    flat = weights.split([one.numel for one in pieces])
    for (piece, batches), values in zip(_batches_of(packed, pieces), flat, strict=True):
        for index, source in zip(piece.taken, batches, strict=True):
            target = piece.view(values, index)
            target.copy_(source.reshape(target.shape))


def _batches_of(
    packed: Tensor, pieces: Sequence[Piece]
) -> Iterator[tuple[Piece, tuple[Tensor, ...]]]:
    """Yield each piece, and the packed matrices of each of its rows, [count, M, N]."""
    batches = packed.split([one.num_matrices for one in pieces])
    for piece, batch in zip(pieces, batches, strict=True):
        yield piece, batch.unflatten(0, (piece.count, len(piece.taken))).unbind(1)


def _bind_momentum(
    pieces: Sequence[Piece], hyper: Tensor, clips: Tensor, squares: Tensor, nesterov: bool
) -> Iterator[BoundKernel]:
    from moe_optim.kernels.momentum_kernel import add_squares_kernel, momentum_kernel

    table = describe_state(pieces)
    parts, bounds = cut_matrices(table, MOMENTUM_PART)
    sums = torch.zeros(int(bounds[-1]), dtype=torch.float64, device=squares.device)
    arguments = (table, parts, MOMENTUM_TILE, hyper, clips, sums)
    yield from bind_parts(momentum_kernel, *arguments, NESTEROV=nesterov)
    if len(squares):
        yield BoundKernel(
            add_squares_kernel,
            len(squares),
            bounds.to(squares.device),
            sums,
            squares,
            LANES=MOMENTUM_LANES,
            num_warps=1,
        )


def _update(piece: Piece, hyper: Tensor, clips: Tensor, squares: Tensor, nesterov: bool) -> None:
    shard = piece.shard
    row, clip = hyper[shard.group], clips[shard.norm]
    if not clip < 0:
        shard.momentum.lerp_(shard.gradient.float() * clip, row[1])
    direction = _direction_of(shard, slice(None), row, clip, nesterov)
    results = squares[piece.start : piece.start + shard.num_matrices].view(shard.shape[0], -1)
    for index in piece.taken:
        matrices = piece.view(direction, index).flatten(1)
        chunk = max(1, _CHUNK // matrices.shape[1])
        sums = [sum_squares_in_order(some) for some in matrices.split(chunk)]
        results[:, index] = torch.cat(sums)


def _direction_of(
    shard: MatrixShard, owned: slice, row: Tensor, clip: Tensor, nesterov: bool
) -> Tensor:
    """Return the direction of the elements ``owned``, which may alias momentum."""
    momentum = shard.momentum[owned]
    if not nesterov or clip < 0:
        return momentum
    return (shard.gradient[owned].float() * clip).lerp(momentum, row[0])


def sum_squares_in_order(matrices: Tensor) -> Tensor:
    """Return the fp64 sum of squares of each matrix, added in the order of the kernels.

    Parts of MOMENTUM_PART elements are summed, then their sums. Each time lane i adds elements i,
    i + lanes, ..., then neighbouring lanes are added, and neighbouring sums of lanes.

    Args:
        matrices: fp32 elements of each matrix, [count, n].
    """
    squares = _pad(matrices.double().square_(), MOMENTUM_PART)
    parts = _add_lanes(squares.view(-1, MOMENTUM_PART), MOMENTUM_TILE.numel)
    return _add_lanes(_pad(parts.view(len(matrices), -1), MOMENTUM_LANES), MOMENTUM_LANES)


def _pad(values: Tensor, length: int) -> Tensor:
    """Append zeros to rows, up to a multiple of ``length``."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % length))


def _add_lanes(values: Tensor, lanes: int) -> Tensor:
    """Return the sum of each row of [rows, n * lanes]."""
    first, *others = values.view(len(values), -1, lanes).unbind(1)
    total = first.clone()
    for one in others:
        total += one
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total[:, 0]
