"""Records of the weights on each rank, and the buckets in which they are sent.

Ranks exchange small records of their weights, in a common order. A *unit* is yielded together:
experts of one linear, or a part of another tensor. A bucket is a byte buffer of tensors of any
dtypes, of one unit or of several.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import TensorInfo

_ALIGNMENT = 16  # bytes; valid for any dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldExperts:
    """Experts of one linear on a rank: their weights, or their biases."""

    linear: str
    """Path of the linear in the model, with global layer numbers."""
    hf_layer: int | None
    """Layer number in Hugging Face's models; None without such a layer."""
    kind: str
    """``weight`` or ``bias``."""
    first: int
    """Index of the first local expert within the layer."""
    count: int
    shape: tuple[int, ...]
    """Shape of one whole expert: [R, C], or [R]."""
    format: str
    """Format of the weights; ``bf16`` for biases."""
    interleave: int | None = None
    """Rows per alternating gate and up block."""
    cut_axis: int | None = None
    """Axis sharded by expert tensor parallelism; None: not sharded."""
    cuts: int = 1
    """Number of shards of each expert."""
    input_amax: float | None = None
    """Calibrated amax of the inputs of weights, where it is exported."""

    @property
    def key(self) -> tuple[str, str]:
        """Linear and kind, of which a rank holds one record."""
        return self.linear, self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """A part (possibly all) of a non-expert tensor on a rank."""

    name: str
    """Name in checkpoints, with the layer number."""
    whole: TensorInfo
    start: tuple[int, ...]
    """Offset of the part in the tensor."""
    part: TensorInfo


HeldRecord = HeldExperts | HeldPart


@dataclass(frozen=True, kw_only=True)
class PartUnit:
    """A part of a non-expert tensor, and who has it."""

    held: HeldPart
    ranks: frozenset[int]
    """Ranks that hold it."""
    is_sent: bool
    """False if all ranks hold it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the part in a bucket, padding included; 0 if it is not sent."""
        return bucket_nbytes([self.held.part]) * self.is_sent

    @property
    def sender(self) -> int:
        """Lowest rank that holds it."""
        return min(self.ranks)

    @property
    def route(self) -> Hashable:
        """What units of one bucket have in common."""
        return self.is_sent and (self.sender,)


@dataclass(frozen=True, kw_only=True)
class ExpertUnit:
    """Experts of one linear that are yielded together."""

    held: HeldExperts
    """Record of one of the ranks that hold some of them."""
    start: int
    """First of the experts, within those of each rank."""
    stop: int
    names: tuple[str, ...]
    """Names of all tensors, in export order."""
    ranks: frozenset[int]
    """Ranks that hold some of them."""
    is_spread: bool
    """Whether ranks of expert parallelism gather each other's experts."""
    infos: tuple[TensorInfo, ...]
    """Buffers that every rank has afterwards: parts of all ranks of expert and expert tensor
    parallelism."""
    is_sent: bool
    """Whether ranks without any receive all."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffers in a bucket, padding included."""
        return bucket_nbytes(self.infos)

    @property
    def sender(self) -> int:
        """Lowest rank that holds some."""
        return min(self.ranks)

    @property
    def route(self) -> Hashable:
        """What units of one bucket have in common: their layer, whose linears share groups."""
        layer = self.held.linear.rpartition(".")[0]
        return layer, self.held.cuts, self.ranks, self.is_spread, self.is_sent


def put_together(held_by: Mapping[int, Sequence[HeldRecord]]) -> dict[HeldRecord, frozenset[int]]:
    """Return the ranks that hold each record, in model order."""
    ranks: dict[HeldRecord, set[int]] = {}
    for rank, records in held_by.items():
        for record in records:
            ranks.setdefault(record, set()).add(rank)
    return {one: frozenset(ranks[one]) for one in sorted(ranks, key=_in_order)}


def _in_order(held: HeldRecord) -> tuple[object, ...]:
    """Sort key: names in natural order, numbers by value."""
    name = held.linear if isinstance(held, HeldExperts) else held.name
    words = tuple((0, int(w), "") if w.isdigit() else (1, 0, w) for w in re.split(r"(\d+)", name))
    rest = (held.kind, held.first) if isinstance(held, HeldExperts) else ("", held.start)
    return (words, *rest)


def batches[Unit: (PartUnit, ExpertUnit)](
    units: Iterable[Unit], bucket_bytes: int
) -> list[list[Unit]]:
    """Group consecutive units that are sent in one bucket, or not sent.

    A group has at most ``bucket_bytes``, unless a single unit is larger.
    """
    found: list[list[Unit]] = []
    size = 0
    for unit in units:
        size += unit.nbytes
        if not found or size > bucket_bytes or found[-1][-1].route != unit.route:
            found.append([])
            size = unit.nbytes
        found[-1].append(unit)
    return found


def bucket_nbytes(infos: Iterable[TensorInfo]) -> int:
    """Return the bytes of tensors in a bucket, padding included."""
    return sum(_aligned(info.nbytes) for info in infos)


def places_in(bucket: Tensor, sizes: Iterable[int]) -> list[Tensor]:
    """Return the place of each tensor in a bucket, [n] uint8, given their sizes in bytes."""
    places, start = [], 0
    for nbytes in sizes:
        places.append(bucket[start : start + nbytes])
        start += _aligned(nbytes)
    return places


def cut_bucket(bucket: Tensor, infos: Sequence[TensorInfo]) -> list[Tensor]:
    """Return a view into a bucket for each tensor."""
    places = places_in(bucket, (info.nbytes for info in infos))
    return [
        place.view(info.dtype).view(info.shape) for place, info in zip(places, infos, strict=True)
    ]


def fill_bucket(bucket: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy tensors to their places in a bucket, with as few launches as possible."""
    places = places_in(bucket, (one.nbytes for one in tensors))
    torch._foreach_copy_(places, [flat_bytes(one) for one in tensors])


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, [n] uint8: a view, or a copy of one with other strides."""
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
