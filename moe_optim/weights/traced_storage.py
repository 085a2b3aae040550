"""What lies behind a quantized weight while ``torch.compile`` traces a graph that reads it."""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from moe_optim import library
from moe_optim.errors import StateError
from moe_optim.formats import Direction, QuantizedWeight, get_format, reference
from moe_optim.formats.reference.dequantizing import values_shape
from moe_optim.weights.handles import object_of
from moe_optim.weights.storage import PortableStorage, WeightStorage


class TracedStorage(PortableStorage):
    """Buffers without values, which become inputs of the graph and may be read there.

    Args:
        quantized: the buffers.
        handle: of the real storage, which every run of the graph asks whether it is fresh.
    """

    def __init__(self, quantized: QuantizedWeight, handle: Tensor) -> None:
        WeightStorage.__init__(self, "a weight in a compiled graph", quantized, "auto")
        self.initial = self._whole = None
        self._handle = handle

    @property
    def handle(self) -> Tensor:
        """That of the real storage."""
        return self._handle

    def dequantize(self, direction: Direction = "rowwise") -> Tensor:
        """Let the graph compute the values of one direction, [E, R, C] bf16."""
        buffers = self.quantized
        data, scale = buffers.data(direction), buffers.scale(direction)
        values: Tensor = _read_weight(
            data, scale, buffers.global_amax, self.handle, self.format.name, direction
        )
        return values

    def require_present(self) -> None:
        """Do nothing: the real storage is asked at every run."""

    def require_writable(self) -> None:
        """Refuse.

        Raises:
            StateError: always; storages are not told what a graph writes.
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
