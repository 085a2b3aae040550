"""Records of the weights that ranks hold, and buckets in which they travel.

Ranks exchange small records of what they hold, in one order for all. A *unit* is what is sent at
once and yielded together: the tensors of one linear of one expert, or this rank's part of another
tensor. Units of several dtypes travel one behind the other in a bucket of bytes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import TensorInfo

_ALIGNMENT = 16  # bytes: any dtype may begin there


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
    """Number of the first expert here among all of the layer."""
    count: int
    shape: tuple[int, ...]
    """Shape of one whole expert: [R, C], or [R]."""
    format: str
    """Format of the weights; ``bf16`` of biases."""
    interleave: int | None = None
    """Rows of gate that alternate with as many of up."""
    cut_axis: int | None = None
    """Axis of an expert that expert tensor parallelism cuts; None where ranks have whole ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """A part of another tensor that a rank holds, which may be all of it."""

    name: str
    """Name in checkpoints, with the number of the layer."""
    whole: TensorInfo
    start: tuple[int, ...]
    """Index of the part's first element in the tensor."""
    part: TensorInfo


HeldRecord = HeldExperts | HeldPart


@dataclass(frozen=True, kw_only=True)
class SendUnit:
    """Tensors that are sent together, and the ranks that have them."""

    held: HeldRecord
    expert: int | None
    """Number among all experts of the layer; None of a part of another tensor."""
    tensors: tuple[TensorInfo, ...]
    ranks: frozenset[int]
    """Ranks that have it."""
    is_sent: bool
    """False where all ranks have it, or where each keeps to its own."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors in a bucket, padding included."""
        return bucket_nbytes(self.tensors)

    @property
    def is_cut(self) -> bool:
        """Whether each of its ranks has a part of an expert, to be put together."""
        return isinstance(self.held, HeldExperts) and self.held.cut_axis is not None

    @property
    def sender(self) -> int:
        """The lowest rank that has it."""
        return min(self.ranks)


def put_together(held_by: Mapping[int, Sequence[HeldRecord]]) -> dict[HeldRecord, frozenset[int]]:
    """Return which ranks hold each record, in the order of the model."""
    ranks: dict[HeldRecord, set[int]] = {}
    for rank, records in held_by.items():
        for record in records:
            ranks.setdefault(record, set()).add(rank)
    return {one: frozenset(ranks[one]) for one in sorted(ranks, key=_in_order)}


def _in_order(held: HeldRecord) -> tuple[object, ...]:
    """Sort weights as a model has them: numbers in names by their value."""
    name = held.linear if isinstance(held, HeldExperts) else held.name
    words = tuple((0, int(w), "") if w.isdigit() else (1, 0, w) for w in re.split(r"(\d+)", name))
    rest = (held.kind, held.first) if isinstance(held, HeldExperts) else ("", held.start)
    return (words, *rest)


def batches(units: Sequence[SendUnit], bucket_bytes: int) -> list[list[SendUnit]]:
    """Return units in order, grouped by what one rank sends in one bucket, or what is not sent.

    A group that is sent or put together has at most ``bucket_bytes``, unless one unit has more.
    """
    found: list[list[SendUnit]] = []
    size = 0
    for unit in units:
        last = found[-1][-1] if found else None
        joins = last is not None and (last.is_sent, last.is_cut) == (unit.is_sent, unit.is_cut)
        if joins and last is not None and unit.is_sent:
            joins = last.sender == unit.sender
        if joins and (unit.is_sent or unit.is_cut):
            joins = size + unit.nbytes <= bucket_bytes
        if not joins:
            found.append([])
            size = 0
        found[-1].append(unit)
        size += unit.nbytes
    return found


def infos_of(tensors: Iterable[Tensor]) -> list[TensorInfo]:
    """Return shapes and dtypes of tensors."""
    return [TensorInfo(tuple(one.shape), one.dtype) for one in tensors]


def bucket_nbytes(infos: Iterable[TensorInfo]) -> int:
    """Return the bytes that tensors take in a bucket, padding included."""
    return sum(_aligned(info.nbytes) for info in infos)


def cut_bucket(bucket: Tensor, infos: Iterable[TensorInfo]) -> list[Tensor]:
    """Return the place of each tensor in a bucket, views of it."""
    places, start = [], 0
    for info in infos:
        flat = bucket[start : start + info.nbytes]
        places.append(flat.view(info.dtype).view(info.shape))
        start += _aligned(info.nbytes)
    return places


def fill_bucket(bucket: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write tensors to their places in a bucket, in as few launches as torch has for it."""
    places = cut_bucket(bucket, infos_of(tensors))
    torch._foreach_copy_([_bytes(one) for one in places], [_bytes(one) for one in tensors])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
