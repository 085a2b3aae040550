"""Executes a transfer plan over torch.distributed, point to point."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.errors import LayoutError
from moe_optim.integration.agreement import agree
from moe_optim.rollout.shards import Shape
from moe_optim.rollout.transfer_plan import Corner, Transfer, TransferPlan
from moe_optim.rollout.units import bucket_nbytes, cut_bucket

Stacked = Tensor | Sequence[Tensor]
"""A stacked tensor [E, R, ...], or one of each expert."""
MESSAGE_BYTES = 2**27
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per item."""
_ByPeer = dict[int, list[Transfer]]
"""Transfers by rank in the group."""


class _Own(NamedTuple):
    """This rank's tensors as integers [E, R, C], whole or by expert."""

    sources: Mapping[str, Sequence[Tensor]]
    targets: Mapping[str, Sequence[Tensor]]

    def source(self, one: Transfer) -> list[Tensor]:
        return _views(self.sources[one.tensor], one.source, one.shape)

    def target(self, one: Transfer) -> list[Tensor]:
        return _views(self.targets[one.tensor], one.target, one.shape)


@torch.no_grad()
def execute(
    plan: TransferPlan,
    sources: Mapping[str, Stacked],
    targets: Mapping[str, Stacked],
    *,
    engine_ranks: Sequence[int],
    training_ranks: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> None:
    """Send and receive every box of a plan, with ``batch_isend_irecv`` over NCCL or gloo.

    Every rank of ``group`` must call it with the same plan. A rank can be of training, of the
    engine, of both, or of neither. Boxes that stay on a rank are copied. Temporary memory is one
    message for each rank that this one sends to or receives from.

    Args:
        plan: plan of the transfers, or some of them (:meth:`TransferPlan.only`).
        sources: tensors of this training rank by name, as :func:`stacked_experts` returns them; not
            read on other ranks.
        targets: tensors of this engine rank by name, [E, R, ...] in any dtype of the plan's item
            size, or one of each expert; written in place. Strides are free: pass the transpose of a
            parameter that the engine stores columns first. Not read on other ranks.
        engine_ranks: rank in ``group`` of each engine rank.
        training_ranks: rank in ``group`` of each training rank; None: the same number.
        group: process group; None for all ranks.
        message_bytes: size of a message in bytes; larger boxes are sent alone.

    Raises:
        LayoutError: on any rank, a tensor is missing or has another size than the plan's, or the
            numbers of ranks are not the plan's.
    """
    me = dist.get_rank(group)
    training = range(len(plan.training)) if training_ranks is None else training_ranks
    own: _Own = agree(lambda: _check_own(plan, sources, targets, me, training, engine_ranks), group)
    sent: _ByPeer = {}
    received: _ByPeer = {}
    for one in plan.transfers:
        sender, receiver = training[one.sender], engine_ranks[one.receiver]
        if sender == me == receiver:
            _copy(own.target(one), own.source(one))
        elif sender == me:
            sent.setdefault(receiver, []).append(one)
        elif receiver == me:
            received.setdefault(sender, []).append(one)
    none: _ByPeer = {}
    for outgoing, incoming in zip_longest(
        _rounds(sent, message_bytes), _rounds(received, message_bytes), fillvalue=none
    ):
        _exchange(outgoing, incoming, own, group)


def _check_own(
    plan: TransferPlan,
    sources: Mapping[str, Stacked],
    targets: Mapping[str, Stacked],
    me: int,
    training: Sequence[int],
    engine: Sequence[int],
) -> _Own:
    for what, ranks, size in (
        ("training_ranks", training, len(plan.training)),
        ("engine_ranks", engine, plan.engine.size),
    ):
        if len(ranks) != size or len(set(ranks)) != size:
            raise LayoutError(
                f"execute: {what}: expected {size} different ranks, as planned, got "
                f"{list(ranks)}. Name the rank in the group of each."
            )
    held = plan.source_shapes(training.index(me)) if me in training else {}
    needed = plan.target_shapes(engine.index(me)) if me in engine else {}
    items = {one.name: one.itemsize for one in plan.tensors}
    return _Own(
        sources={n: _pieces(n, sources.get(n), shape, items[n]) for n, shape in held.items()},
        targets={n: _pieces(n, targets.get(n), shape, items[n]) for n, shape in needed.items()},
    )


def _pieces(name: str, given: Stacked | None, shape: Shape, itemsize: int) -> list[Tensor]:
    """Return tensors as integers [E, R, C], or [1, R, C] each; LayoutError if they do not fit."""
    pieces = [] if given is None else [given] if isinstance(given, Tensor) else list(given)
    experts, rows, columns = shape[0] // max(1, len(pieces)), shape[1], shape[2] // itemsize
    size = experts, rows, columns
    fits = len(pieces) in (1, shape[0]) and all(
        one.itemsize == itemsize
        and (_long(one.shape) == _long(size) if one.dim() < 3 else tuple(one.shape) == size)
        for one in pieces
    )
    if not fits:
        got = f"{len(pieces)} of {list(pieces[0].shape)} {pieces[0].dtype}" if pieces else "none"
        raise LayoutError(
            f"execute: {name}: expected a tensor of {[shape[0], rows, columns]}, {itemsize} bytes "
            f"per item, or one for each expert, got {got}. Pass tensors of the plan's shapes."
        )
    boxes = [one.detach() if one.dim() == 3 else one.detach().view(size) for one in pieces]
    return [one.view(_INTEGERS[itemsize]) for one in boxes]


def _long(shape: Sequence[int]) -> list[int]:
    return [length for length in shape if length > 1]


def _views(pieces: Sequence[Tensor], at: Corner, shape: Shape) -> list[Tensor]:
    """Return a box as one view [experts, rows, columns], or as one [1, rows, columns] of each."""
    count, rows, columns = shape
    size = pieces[0].itemsize
    experts = slice(at.expert, at.expert + (count - 1) * at.step + 1, at.step)
    box = (
        slice(at.row, at.row + rows),
        slice(at.column // size, (at.column + columns) // size),
    )
    if len(pieces) == 1:
        return [pieces[0][experts, *box]]
    return [piece[:, *box] for piece in pieces[experts]]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy a box; either side may be one view or one of each expert."""
    if len(targets) != len(sources):
        targets, sources = ([one for view in side for one in view] for side in (targets, sources))
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _rounds(by_peer: _ByPeer, message_bytes: int) -> Iterator[_ByPeer]:
    """Yield the next message of every peer, until none is left."""
    messages = {peer: list(_messages(some, message_bytes)) for peer, some in by_peer.items()}
    for number in range(max(map(len, messages.values()), default=0)):
        yield {peer: every[number] for peer, every in messages.items() if number < len(every)}


def _messages(transfers: Sequence[Transfer], message_bytes: int) -> Iterator[list[Transfer]]:
    message: list[Transfer] = []
    size = 0
    for one in transfers:
        if message and size + one.nbytes > message_bytes:
            yield message
            message, size = [], 0
        message.append(one)
        size += one.nbytes
    if message:
        yield message


def _exchange(outgoing: _ByPeer, incoming: _ByPeer, own: _Own, group: Any) -> None:
    operations, arriving = [], []
    for peer, transfers in outgoing.items():
        sent = [own.source(one) for one in transfers]
        bucket, places = _bucket(transfers, sent)
        for place, views in zip(places, sent, strict=True):
            _copy([place], views)
        operations.append(dist.P2POp(dist.isend, bucket, group=group, group_peer=peer))
    for peer, transfers in incoming.items():
        filled = [own.target(one) for one in transfers]
        bucket, places = _bucket(transfers, filled)
        arriving.append((filled, places))
        operations.append(dist.P2POp(dist.irecv, bucket, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for filled, places in arriving:
        for views, place in zip(filled, places, strict=True):
            _copy(views, [place])


def _bucket(
    transfers: Sequence[Transfer], boxes: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """Allocate a message, and return it and the place of each box, [experts, rows, columns]."""
    infos = [
        TensorInfo((one.shape[0], *view.shape[1:]), view.dtype)
        for one, (view, *_) in zip(transfers, boxes, strict=True)
    ]
    bucket = torch.empty(bucket_nbytes(infos), dtype=torch.uint8, device=boxes[0][0].device)
    return bucket, cut_bucket(bucket, infos)
