"""Tensor addresses, recorded once and compared at every step.

``data``, resizing a storage and replacing attributes all move memory silently. A step checks
thousands of tensors, so the loops run in C.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

_VERSION = attrgetter("_version")


class Places:
    """Tensors, which are kept alive, and their addresses at construction."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._addresses = addresses_of(self.tensors)

    @classmethod
    def of_each_memory(cls, tensors: Iterable[Tensor]) -> "Places":
        """Record one tensor per storage; the others move with it."""
        return cls({one.untyped_storage().data_ptr(): one for one in tensors}.values())

    @property
    def have_moved(self) -> bool:
        """Whether some tensor has moved."""
        return addresses_of(self.tensors) != self._addresses

    def count_writes(self) -> int:
        """Return the number of in-place writes that the tensors' version counters report."""
        return sum(map(_VERSION, self.tensors))


class Attributes:
    """Tensor attributes of objects, and their addresses at construction.

    ``addresses`` map an attribute to the address per owner, 0 for None; ``flags`` are attributes
    that are true if the owner, which is kept alive, must be fixed up.
    """

    def __init__(
        self,
        owners: Sequence[object],
        addresses: Mapping[str, Sequence[int]],
        flags: Sequence[str] = (),
    ) -> None:
        self._owners = owners
        self._addresses = {name: list(held) for name, held in addresses.items()}
        self._flags = tuple(flags)

    @classmethod
    def of(
        cls, owners: Sequence[object], names: Iterable[str], flags: Sequence[str] = ()
    ) -> "Attributes":
        """Record the attributes ``names``, which all owners have and which may be None."""
        return cls(owners, {name: _find(owners, name) for name in names}, flags)

    @property
    def have_moved(self) -> bool:
        """Whether some owner's tensor was replaced or has moved, or a flag is true."""
        if any(any(map(attrgetter(flag), self._owners)) for flag in self._flags):
            return True
        return any(_find(self._owners, name) != held for name, held in self._addresses.items())

    def addresses(self) -> list[list[int]]:
        """Return the address of each owner's tensor, 0 for None, per name."""
        return [_find(self._owners, name) for name in self._addresses]

    @classmethod
    def merge(cls, parts: "Iterable[Attributes]") -> "tuple[Attributes, ...]":
        """Merge parts with equal names and flags."""
        alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Attributes]] = {}
        for part in parts:
            alike.setdefault((tuple(part._addresses), part._flags), []).append(part)
        return tuple(
            cls(
                [owner for part in of_names for owner in part._owners],
                {name: [at for part in of_names for at in part._addresses[name]] for name in names},
                flags,
            )
            for (names, flags), of_names in alike.items()
        )


def this_device() -> torch.device:
    """Return the current device: a GPU with its index, or the CPU under the CPU runtime."""
    return torch.empty(0, dtype=torch.uint8, device=torch.cuda.current_device()).device


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is empty or has memory, which offloading frees."""
    return not tensor.numel() or bool(tensor.untyped_storage().size())


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the address of the first element of each tensor."""
    return list(map(Tensor.data_ptr, tensors))


def _find(owners: Sequence[object], name: str) -> list[int]:
    under = attrgetter(name)
    try:
        return addresses_of(map(under, owners))
    except TypeError:  # some attribute is None
        return [0 if tensor is None else tensor.data_ptr() for tensor in map(under, owners)]
