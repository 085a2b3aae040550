"""Storage of weights in ``torch.compile`` graphs, which look weights up by handle at every run."""

from functools import partial
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from moe_optim import library
from moe_optim.errors import StateError
from moe_optim.formats import Direction, QuantizedWeight, get_format
from moe_optim.formats.reference.dequantizing import empty_values
from moe_optim.kernels.dequantize import dequantize
from moe_optim.weights.storage import PortableStorage, WeightStorage

_numbers = count()
_handles: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def handle_of(named: Any) -> Tensor:
    """Return the handle of a linear or a storage: a unique 0-dim int64 tensor on the host.

    As a tensor, the handle is a graph input rather than a constant, so identical layers share a
    graph. A copy of an object has its own handle.
    """
    if named not in _handles:
        number = next(_numbers)  # never reused
        _handles[named] = torch.tensor(number, dtype=torch.int64, device="cpu")
        _objects[number] = named
    return _handles[named]


def object_of(handle: Tensor) -> Any:
    """Return the object of a handle; StateError if it was freed."""
    named = _objects.get(int(handle))
    if named is None:
        raise StateError(
            "compiled graph: expected the expert weights it was called with, got none: they were "
            "freed, or the graph comes from another process. Keep the module until its backward "
            "passes are done."
        )
    return named


class TracedStorage(PortableStorage):
    """Storage of a weight while a graph that reads it is traced: buffers without values.

    The buffers become inputs of the graph; every run checks the freshness of the real storage by
    ``handle``.
    """

    def __init__(self, quantized: QuantizedWeight, handle: Tensor) -> None:
        WeightStorage.__init__(self, "a weight in a compiled graph", quantized, "auto")
        self.handle = handle

    def dequantize(self, direction: Direction = "rowwise") -> Tensor:
        """Trace the values of one direction, [E, R, C] bf16."""
        held = self.quantized
        data, scale = held.data(direction), held.scale(direction)
        values: Tensor = _read_weight(
            data, scale, held.global_amax, self.format.name, direction, self.handle
        )
        return values

    def require_present(self) -> None:
        """Do nothing: every run checks the real storage."""

    def require_writable(self) -> None:
        """Raise StateError: a graph cannot notify storages of writes."""
        raise StateError(
            f"{self.name}: quantized weights are not written in compiled graphs. Write them "
            "outside of the compiled function."
        )


@partial(library.operation, fake=empty_values(torch.bfloat16))
def _read_weight(
    data: Tensor,
    scale: Tensor,
    global_amax: Tensor | None,
    format: str,
    direction: str,
    handle: Tensor,
) -> Tensor:
    storage: WeightStorage = object_of(handle)
    storage.require_fresh()
    storage.require_present()
    buffers = data, scale, get_format(format), cast(Direction, direction)
    return dequantize(*buffers, global_amax=global_amax, backend=storage.backend)
