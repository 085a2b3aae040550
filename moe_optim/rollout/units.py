"""What ranks hold of a model's weights: small records that they exchange, in one order for all.

A *unit* is what is sent at once and yielded together: the tensors of one linear of one expert, or
this rank's part of another tensor.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_optim.rollout.buckets import TensorInfo, bucket_nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldExperts:
    """Experts of one linear that a rank holds: their weights, or their biases."""

    linear: str
    """Path of the linear in the model, layers numbered over all pipeline stages."""
    hf_layer: int | None
    """Number of the layer in Hugging Face's models; None where they have no such layer."""
    kind: str
    """``weight`` or ``bias``."""
    first: int
    """Of all experts of the layer, the first that is here."""
    count: int
    shape: tuple[int, ...]
    """Of one whole expert: [R, C], or [R]."""
    format: str
    """Of the weights; ``bf16`` of biases."""
    interleave: int | None = None
    """Rows of gate that alternate with as many of up."""
    cut_axis: int | None = None
    """Axis of an expert that expert tensor parallelism cuts; None where ranks have whole ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """A part of another tensor that a rank holds, which may be all of it."""

    name: str
    """As checkpoints have it, layers told apart."""
    whole: TensorInfo
    start: tuple[int, ...]
    """Where the part begins in the tensor."""
    part: TensorInfo


Held = HeldExperts | HeldPart


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is sent at once, and who has it."""

    held: Held
    expert: int | None
    """Among all experts of the layer; None of a part of another tensor."""
    tensors: tuple[TensorInfo, ...]
    holders: frozenset[int]
    """Ranks that have it; the lowest sends it."""
    is_sent: bool
    """Whether others get it: it is not where all have it, or where each keeps to its own."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors, each with what lies between it and the next in a bucket."""
        return bucket_nbytes(self.tensors)

    @property
    def is_cut(self) -> bool:
        """Whether each holder has a part of an expert, so that they have to put it together."""
        return isinstance(self.held, HeldExperts) and self.held.cut_axis is not None

    @property
    def owner(self) -> int:
        """The rank that sends it."""
        return min(self.holders)


def in_order(held: Held) -> tuple[object, ...]:
    """Return what sorts weights as a model has them: numbers in names by their value."""
    name = held.linear if isinstance(held, HeldExperts) else held.name
    words = tuple((0, int(w), "") if w.isdigit() else (1, 0, w) for w in re.split(r"(\d+)", name))
    rest = (held.kind, held.first) if isinstance(held, HeldExperts) else ("", held.start)
    return (words, *rest)


def batches(units: Sequence[Unit], bucket_bytes: int) -> list[list[Unit]]:
    """Return units in order, together what one rank sends in one bucket, or what is not sent.

    What is sent or put together at once has at most ``bucket_bytes``, unless a unit has more.
    """
    found: list[list[Unit]] = []
    size = 0
    for unit in units:
        last = found[-1][-1] if found else None
        joins = last is not None and (last.is_sent, last.is_cut) == (unit.is_sent, unit.is_cut)
        if joins and last is not None and unit.is_sent:
            joins = last.owner == unit.owner
        if joins and (unit.is_sent or unit.is_cut):
            joins = size + unit.nbytes <= bucket_bytes
        if not joins:
            found.append([])
            size = 0
        found[-1].append(unit)
        size += unit.nbytes
    return found


def put_together(held_by: Mapping[int, Sequence[Held]]) -> dict[Held, frozenset[int]]:
    """Return which ranks hold each record, in the order of the model."""
    holders: dict[Held, set[int]] = {}
    for rank, records in held_by.items():
        for record in records:
            holders.setdefault(record, set()).add(rank)
    return {one: frozenset(holders[one]) for one in sorted(holders, key=in_order)}
