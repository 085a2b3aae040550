"""Tensors of several dtypes one behind the other in one tensor of bytes, as they are sent."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: any dtype may begin there


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that is still to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def infos_of(tensors: Iterable[Tensor]) -> list[TensorInfo]:
    """Return what tensors are."""
    return [TensorInfo(tuple(one.shape), one.dtype) for one in tensors]


def bucket_nbytes(infos: Iterable[TensorInfo]) -> int:
    """Return the bytes of tensors, each with what lies between it and the next in a bucket."""
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
    pairs = [(_bytes(place), _bytes(tensor)) for place, tensor in zip(places, tensors, strict=True)]
    torch._foreach_copy_([place for place, _ in pairs], [tensor for _, tensor in pairs])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
