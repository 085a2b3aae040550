"""What lies behind a quantized weight while ``torch.compile`` traces a graph that has it as input."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.formats import BlockScaledFormat, Direction, QuantizedWeight
from moe_optim.modules.storage import PortableStorage


class TracedStorage(PortableStorage):
    """Planes without values, which become inputs of the graph.

    The graph may read them. The real weight is asked whether it is fresh when a run fetches its
    planes, see ``GroupedWeight.rowwise_data``.
    """

    @classmethod
    def of_planes(
        cls, format: BlockScaledFormat, shape: Sequence[int], planes: Sequence[Tensor]
    ) -> "TracedStorage":
        """Return a storage over planes in the order of ``format.plane_names``."""
        quantized = QuantizedWeight.of_planes(format, shape, planes)
        storage = cls.viewing(quantized, "a weight in a compiled graph", "auto")
        assert isinstance(storage, TracedStorage)
        return storage

    def dequantize(self, direction: Direction = "rowwise") -> Tensor:
        """Let the graph compute the values of one direction, [E, R, C] bf16."""
        planes = self.quantized
        values: Tensor = torch.ops.moe_optim.dequantize_bf16(
            planes.data(direction),
            planes.scale(direction),
            planes.global_amax,
            self.format.name,
            direction,
        )
        return values

    def require_writable(self) -> None:
        """Raise StateError: a write would be lost, or seen too late by what reads the storage."""
        raise StateError(
            f"{self.name}: quantized weights are not written in compiled graphs. Write them outside "
            "of the compiled function."
        )
