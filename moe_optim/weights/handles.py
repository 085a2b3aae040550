"""Handles: how compiled graphs name the linears and storages of this process."""

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from moe_optim.errors import StateError

_numbers = count()
_handles: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def handle_of(named: Any) -> Tensor:
    """Return the handle of an object: a number, as a 0-dim int64 tensor on the host.

    A number in a tensor is an input of a graph and no constant in it, so layers that differ in
    nothing else share a graph. A copy of an object has a handle of its own.
    """
    if named not in _handles:
        number = next(_numbers)  # never one of something that is gone
        _handles[named] = torch.tensor(number, dtype=torch.int64, device="cpu")
        _objects[number] = named
    return _handles[named]


def object_of(handle: Tensor) -> Any:
    """Return what has the handle.

    Raises:
        StateError: it is gone.
    """
    named = _objects.get(int(handle))
    if named is None:
        raise StateError(
            "compiled graph: expected the expert weights it was called with, got none: they were "
            "freed, or the graph comes from another process. Keep the module until its backward "
            "passes are done."
        )
    return named
