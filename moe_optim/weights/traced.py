"""How graphs of ``torch.compile`` know weights: by numbers, which are looked up at every run."""

from functools import partial
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from moe_optim import library
from moe_optim.errors import StateError
from moe_optim.formats import Direction, QuantizedWeight, get_format, reference
from moe_optim.formats.reference.dequantizing import values_shape
from moe_optim.weights.storage import PortableStorage, WeightStorage

_numbers = count()
_handles: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def handle_of(named: Any) -> Tensor:
    """Return the handle of a linear or a storage: a number, as a 0-dim int64 tensor on the host.

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


class TracedStorage(PortableStorage):
    """The storage of a weight while a graph that reads it is traced: buffers without values.

    Args:
        quantized: data and scales, which become inputs of the graph.
        handle: handle of the real storage, which every run of the graph asks whether it is fresh.
    """

    def __init__(self, quantized: QuantizedWeight, handle: Tensor) -> None:
        WeightStorage.__init__(self, "a weight in a compiled graph", quantized, "auto")
        self.handle = handle

    def dequantize(self, direction: Direction = "rowwise") -> Tensor:
        """Let the graph compute the values of one direction, [E, R, C] bf16."""
        held = self.quantized
        data, scale = held.data(direction), held.scale(direction)
        values: Tensor = _read_weight(
            data, scale, held.global_amax, self.handle, self.format.name, direction
        )
        return values

    def require_present(self) -> None:
        """Do nothing: the real storage is asked at every run."""

    def require_writable(self) -> None:
        """Refuse, since storages are not told what a graph writes.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"{self.name}: quantized weights are not written in compiled graphs. Write them "
            "outside of the compiled function."
        )


def _empty_values(
    data: Tensor, scale: Tensor, global_amax: Tensor | None, _: Tensor, format: str, way: str
) -> Tensor:
    shape = values_shape(data, get_format(format), cast(Direction, way))
    return data.new_empty(shape, dtype=torch.bfloat16)


@partial(library.operation, fake=_empty_values)
def _read_weight(
    data: Tensor,
    scale: Tensor,
    global_amax: Tensor | None,
    handle: Tensor,
    format: str,
    direction: str,
) -> Tensor:
    storage: WeightStorage = object_of(handle)
    storage.require_fresh()
    storage.require_present()
    buffers = data, scale, get_format(format), cast(Direction, direction)
    return reference.dequantize_bf16(*buffers, global_amax=global_amax)
