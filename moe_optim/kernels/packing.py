"""Plans around the iteration of a Muon step: packing directions into batches, and unpacking."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from moe_optim.formats.reference.newton_schulz import EPS
from moe_optim.kernels.matrices import Piece
from moe_optim.kernels.matrix_table import (
    bind_parts,
    cut_matrices,
    describe_state,
    describe_weights,
)
from moe_optim.kernels.momentum import direction_of
from moe_optim.kernels.plan import Backend, Call, Plan, takes_kernels
from moe_optim.kernels.tuning import PACK_PART, PACK_TILE


def plan_pack(
    pieces: Sequence[Piece],
    squares: Tensor,
    packed: Tensor,
    hyper: Tensor,
    clips: Tensor,
    *,
    nesterov: bool,
    backend: Backend = "auto",
) -> Plan:
    """Plan what follows :class:`Momentum`: directions, divided by their norms, go to a batch.

    With ``m`` the updated momentum::

        u = lerp(clip * gradient, m, momentum)      without Nesterov or with a negative clip: m
        x = u / max(sqrt(sum of u^2), 1e-7)

    ``pieces`` are matrices of one shape, from :meth:`Momentum.piece`, whose gradients still hold
    what the momentum was updated with; matrix b of ``packed``, [B, M, N] bf16, fp16 or fp32,
    contiguous, is their b-th. All tensors are read at every launch.
    """
    calls: tuple[Call, ...] = (partial(_pack, pieces, squares, packed, hyper, clips, nesterov),)
    if takes_kernels(backend, hyper.device, e4m3=False):
        from moe_optim.kernels.momentum_kernel import pack_kernel

        table = describe_state(pieces, packed)
        parts, _ = cut_matrices(table, PACK_PART)
        arguments = (hyper, clips, squares, packed)
        bound = bind_parts(pack_kernel, table, parts, PACK_TILE, *arguments, NESTEROV=nesterov)
        calls = tuple(bound)
    return Plan(device=hyper.device, calls=calls)


def plan_unpack(
    packed: Tensor, pieces: Sequence[Piece], weights: Tensor, *, backend: Backend = "auto"
) -> Plan:
    """Plan the inverse of :func:`plan_pack`'s permutation of rows.

    It writes the elements of the pieces' weights, one piece after the other, [n] of the batch's
    dtype, contiguous. Rows of other matrices are not written.
    """
    calls: tuple[Call, ...] = (partial(_unpack, packed, pieces, weights),)
    if takes_kernels(backend, packed.device, e4m3=False):
        from moe_optim.kernels.momentum_kernel import unpack_kernel

        table = describe_weights(pieces, weights, packed)
        parts, _ = cut_matrices(table, PACK_PART)
        calls = tuple(bind_parts(unpack_kernel, table, parts, PACK_TILE, packed))
    return Plan(device=packed.device, calls=calls)


def _pack(
    pieces: Sequence[Piece],
    squares: Tensor,
    packed: Tensor,
    hyper: Tensor,
    clips: Tensor,
    nesterov: bool,
) -> None:
    batches = packed.split([one.num_matrices for one in pieces])
    for piece, batch in zip(pieces, batches, strict=True):
        shard = piece.shard
        row, clip = hyper[shard.group], clips[shard.norm]
        numel = shard.shape[1] * shard.shape[2]
        owned = slice(piece.first * numel, piece.last * numel)
        direction = direction_of(shard, owned, row, clip, nesterov)
        per_weight = squares[piece.start : piece.start + shard.num_matrices]
        per_weight = per_weight.view(shard.shape[0], -1)[piece.first : piece.last]
        targets = batch.unflatten(0, (piece.last - piece.first, len(piece.taken))).unbind(1)
        for index, target in zip(piece.taken, targets, strict=True):
            norms = per_weight[:, index].sqrt().float().clamp_min(EPS)
            matrices = piece.view(direction, index) / norms[:, None, None, None]
            target.copy_(matrices.reshape(target.shape))


def _unpack(packed: Tensor, pieces: Sequence[Piece], weights: Tensor) -> None:
    batches = packed.split([one.num_matrices for one in pieces])
    flat = weights.split([one.numel for one in pieces])
    for piece, batch, values in zip(pieces, batches, flat, strict=True):
        sources = batch.unflatten(0, (piece.last - piece.first, len(piece.taken))).unbind(1)
        for index, source in zip(piece.taken, sources, strict=True):
            target = piece.view(values, index)
            target.copy_(source.reshape(target.shape))
