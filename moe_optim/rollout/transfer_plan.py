"""Plans which training rank sends which box of which expert to which rank of an engine."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from moe_optim.errors import LayoutError, listed
from moe_optim.rollout.shards import EngineLayout, Shape, Shard, StackedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Corner:
    """Position of a box in a rank's stacked tensor."""

    expert: int
    """Local index of the first expert."""
    step: int
    """Distance between experts."""
    row: int
    """First row."""
    column: int
    """First byte of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A box of a stacked tensor that one training rank sends to one engine rank."""

    tensor: str
    """Name of the stacked tensor."""
    sender: int
    """Training rank."""
    receiver: int
    """Engine rank."""
    shape: Shape
    """Experts, rows, and bytes per row."""
    source: Corner
    """Position in the sender's tensor."""
    target: Corner
    """Position in the receiver's tensor."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        experts, rows, columns = self.shape
        return experts * rows * columns


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """Every transfer of an update of an engine's experts: data, without tensors. Picklable.

    The transfers write each byte of each engine rank's tensors exactly once. Among training ranks
    with the same shards, none sends more than their average and one of their largest transfers;
    transfers to the rank beside a sender do not count.
    """

    tensors: tuple[StackedTensor, ...]
    """Stacked tensors, those of the first training rank first, in the order of its chunks."""
    training: tuple[Mapping[str, Shard], ...]
    """Shards of each training rank, by tensor name."""
    engine: EngineLayout
    """Layout of the engine."""
    transfers: tuple[Transfer, ...]
    """Ordered by tensor, then by engine rank."""

    def only(self, names: Collection[str]) -> "TransferPlan":
        """Return the plan of some tensors, to update an engine piece by piece.

        Args:
            names: names of the tensors.
        """
        return replace(
            self,
            tensors=tuple(one for one in self.tensors if one.name in names),
            transfers=tuple(one for one in self.transfers if one.tensor in names),
        )

    def source_shapes(self, rank: int) -> dict[str, Shape]:
        """Return experts, rows and bytes per row of a training rank's tensors, by name.

        Args:
            rank: training rank.
        """
        held = self.training[rank]
        return {
            one.name: one.local_shape(held[one.name]) for one in self.tensors if one.name in held
        }

    def target_shapes(self, rank: int) -> dict[str, Shape]:
        """Return experts, rows and bytes per row of an engine rank's tensors, by name.

        Args:
            rank: engine rank.
        """
        return {
            one.name: one.local_shape(self.engine.shard(rank, one.shape[0])) for one in self.tensors
        }

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that a training rank sends.

        Args:
            rank: training rank.
        """
        return sum(one.nbytes for one in self.transfers if one.sender == rank)


def plan_of_shards(
    tensors: Sequence[StackedTensor],
    training: Sequence[Mapping[str, Shard]],
    engine: EngineLayout,
    *,
    beside: Mapping[int, int] | None = None,
) -> TransferPlan:
    """Return the transfers that fill every engine rank. No rank communicates.

    Of several training ranks with the same bytes, the one that has been given the fewest so far
    sends.

    Args:
        tensors: records of the model's stacked tensors, with shapes in bytes of any dtype.
        training: shards of each training rank, by tensor name; a rank need not hold every tensor.
        engine: layout of the engine.
        beside: engine rank -> training rank at the same place, such as on the same GPU, which is
            preferred as its sender.

    Raises:
        ConfigError: fewer experts than expert-parallel ranks of the engine.
        LayoutError: no training rank holds a part of an expert, ranks cut one in different ways, or
            a part does not consist of whole blocks of scales.
    """
    beside = beside or {}
    load = dict.fromkeys(range(len(training)), 0)
    transfers: list[Transfer] = []
    boxes_of = cache(_boxes)  # layers are alike
    for tensor in tensors:
        holders = _holders(tensor, training)
        tensor.require_whole_blocks(engine.tensor_parallel_size, "the engine")
        for receiver in range(engine.size):
            shard = engine.shard(receiver, tensor.shape[0])
            for box in boxes_of(replace(tensor, name=""), tuple(holders), shard):
                ranks = holders[box.shard]
                sender = beside.get(receiver)
                if sender not in ranks:
                    sender = min(ranks, key=lambda rank: (load[rank], rank))
                transfer = Transfer(
                    tensor=tensor.name, sender=sender, receiver=receiver,
                    shape=box.shape, source=box.source, target=box.target,
                )  # fmt: skip
                if sender != beside.get(receiver):
                    load[sender] += transfer.nbytes
                transfers.append(transfer)
    return TransferPlan(
        tensors=tuple(tensors),
        training=tuple(training),
        engine=engine,
        transfers=tuple(transfers),
    )


class _Box(NamedTuple):
    """A box that a shard of training has and an engine rank needs."""

    shard: Shard
    shape: Shape
    source: Corner
    target: Corner


def _holders(
    tensor: StackedTensor, training: Sequence[Mapping[str, Shard]]
) -> dict[Shard, list[int]]:
    """Return the training ranks that hold each distinct shard."""
    ranks = defaultdict(list)
    parts: dict[int, set[tuple[int, int]]] = {expert: set() for expert in range(tensor.shape[0])}
    for rank, shards in enumerate(training):
        if (shard := shards.get(tensor.name)) is None:
            continue
        if tensor.axis is None:
            shard = replace(shard, part=0, parts=1)
        elif shard not in ranks:
            tensor.require_whole_blocks(shard.parts, "training")
        ranks[shard].append(rank)
    for shard in ranks:
        for expert in shard.experts:
            parts[expert].add((shard.part, shard.parts))
    _require_every_part(tensor, parts)
    return ranks


def _require_every_part(
    tensor: StackedTensor, parts: Mapping[int, Collection[tuple[int, int]]]
) -> None:
    """Check that the shards of each expert are all of its parts, each cut in the same way."""
    wrong = [
        f"expert {expert}: "
        + (", ".join(f"part {part} of {count}" for part, count in sorted(found)) or "no part")
        for expert, found in parts.items()
        if sorted(found) != [(part, len(found)) for part in range(len(found))] or not found
    ]
    if wrong:
        raise LayoutError(
            f"plan_transfers: {tensor.name}: expected every part of {tensor.shape[0]} experts on "
            f"training ranks, cut in one way, got {listed(wrong, separator='; ')}. Give the shards "
            "of all training ranks."
        )


def _boxes(tensor: StackedTensor, holders: Sequence[Shard], needed: Shard) -> list[_Box]:
    boxes = []
    targets = list(tensor.segments(needed, in_training=False))
    _, rows, columns = tensor.local_shape(needed)
    for held in holders:
        for source in tensor.segments(held, in_training=True):
            for target in targets:
                start = max(source.start, target.start)
                end = min(source.start + source.length, target.start + target.length)
                if start >= end:
                    continue
                size = [rows, columns]
                size[tensor.axis or 0] = end - start
                at, to = source.local + start - source.start, target.local + start - target.start
                for own, theirs in _pairs(held.experts, needed.experts):
                    box = _Box(
                        shard=held,
                        shape=(len(own), size[0], size[1]),
                        source=_corner(own, tensor.axis, at),
                        target=_corner(theirs, tensor.axis, to),
                    )
                    boxes.append(box)
    return boxes


def _corner(experts: range, axis: int | None, offset: int) -> Corner:
    row, column = (0, offset) if axis == 1 else (offset, 0)
    return Corner(expert=experts.start, step=experts.step, row=row, column=column)


def _pairs(held: Sequence[int], needed: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield local indices of the experts that both hold, in few ranges of even steps."""
    index = {expert: local for local, expert in enumerate(held)}
    both = [(index[expert], local) for local, expert in enumerate(needed) if expert in index]
    start = 0
    while start < len(both):
        source, target = both[start]
        steps, stop = (1, 1), start + 1
        if stop < len(both) and both[stop][0] > source:
            steps = both[stop][0] - source, both[stop][1] - target
        ends = source, target
        while True:
            ends = ends[0] + steps[0], ends[1] + steps[1]
            if stop == len(both) or both[stop] != ends:
                break
            stop += 1
        yield range(source, ends[0], steps[0]), range(target, ends[1], steps[1])
        start = stop
