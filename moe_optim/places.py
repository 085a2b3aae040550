"""Addresses of tensors, noted once and compared at every step.

Memory is freed and exchanged without a word: by ``data``, by resizing a storage, by giving an
object another tensor. A step asks of thousands of tensors, so all of this runs in loops of C.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from torch import Tensor

_VERSION = attrgetter("_version")


class Places:
    """Tensors, which it holds, and the addresses that they had when this was made.

    Args:
        tensors: tensors of any device, any number of them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._addresses = addresses_of(self.tensors)

    @classmethod
    def of_each_memory(cls, tensors: Iterable[Tensor]) -> "Places":
        """Note one tensor of each piece of memory: the others move with it."""
        return cls({one.untyped_storage().data_ptr(): one for one in tensors}.values())

    @property
    def have_moved(self) -> bool:
        """Whether some tensor lies elsewhere by now."""
        return addresses_of(self.tensors) != self._addresses

    def count_writes(self) -> int:
        """Return how many writes the version counters of the tensors tell of."""
        return sum(map(_VERSION, self.tensors))


class Attributes:
    """Tensors that objects have under some names, and the addresses they had when this was made.

    Args:
        owners: the objects, which are held.
        addresses: name of an attribute -> the address under it, for each owner; 0 is None.
        flags: attributes that are true where something has to be put in order.
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
        """Note what lies under ``names`` now, None allowed; all owners have all of them."""
        return cls(owners, {name: _find(owners, name) for name in names}, flags)

    @property
    def have_moved(self) -> bool:
        """Whether some owner has another tensor, or one that lies elsewhere, or a flag is true."""
        if any(any(map(attrgetter(flag), self._owners)) for flag in self._flags):
            return True
        return any(_find(self._owners, name) != held for name, held in self._addresses.items())

    def addresses(self) -> list[list[int]]:
        """Return the address of each owner's tensor, 0 for None, name by name."""
        return [_find(self._owners, name) for name in self._addresses]

    @classmethod
    def merge(cls, parts: "Iterable[Attributes]") -> "tuple[Attributes, ...]":
        """Merge parts whose attributes have equal names into one."""
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


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor that has elements has memory behind it: offloading frees that."""
    return not tensor.numel() or bool(tensor.untyped_storage().size())


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the address of the first element of each tensor."""
    return list(map(Tensor.data_ptr, tensors))


def _find(owners: Sequence[object], name: str) -> list[int]:
    under = attrgetter(name)
    try:
        return addresses_of(map(under, owners))
    except TypeError:  # None is no tensor
        return [0 if tensor is None else tensor.data_ptr() for tensor in map(under, owners)]
