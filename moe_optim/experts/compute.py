"""Quantized copies of bf16 weights, for products in a narrow format."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat, Direction
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.weights.storage import PortableStorage


class QuantizedCopy:
    """What products read in place of bf16 weights: their values, quantized in one call.

    Every forward product makes the copy anew, since bf16 weights may be written in ways that torch
    does not see: optimizer and gather write through the buffer that weights are views of, and
    others through ``data``. A dgrad reads the copy of the last forward product.

    Args:
        format: of the copy.
        shape: [E, R, C] of all weights.
        name: for errors.
        backend: who quantizes.

    Raises:
        LayoutError: the shape does not fit the format.
    """

    def __init__(
        self,
        format: BlockScaledFormat,
        shape: tuple[int, int, int],
        name: str,
        backend: Backend,
    ) -> None:
        format.check_shape(shape, name)
        self.format = format
        self.shape = shape
        self.name = name
        self.backend = backend
        self._storage: PortableStorage | None = None
        self._table: MemberTable | None = None
        self._places: tuple[int, ...] = ()  # where the weights lay when the table was built
        self._made_of: tuple[int, ...] | None = None  # how often each weight had been written

    def __reduce__(self) -> Any:
        """Copy and pickle what it is, without the buffers: they follow from the weights."""
        return QuantizedCopy, (self.format, self.shape, self.name, self.backend)

    @torch.no_grad()
    def dequantize(
        self,
        weights: Sequence[Tensor],
        direction: Direction,
        *,
        keep: bool,
        amax: Tensor | None = None,
    ) -> Tensor:
        """Return the values of one direction.

        Args:
            weights: one bf16 tensor [E, R, C], or E of [R, C]; contiguous.
            direction: rowwise for the forward product, columnwise for dgrad.
            keep: whether a dgrad may read the copy that is made now.
            amax: of a calibration; not read, since blocks have their own.

        Returns:
            [E, R, C] bf16, newly allocated.
        """
        places = tuple(weight.data_ptr() for weight in weights)
        if self._storage is None or self._table is None or places != self._places:
            self._storage, self._table = self._lay_out(weights)
            self._places, self._made_of = places, None
        now = tuple(weight._version for weight in weights)
        if direction == "rowwise" or now != self._made_of:
            self._table.launch()
            self._table.finish.launch()
            self._made_of = now if keep else None
        return self._storage.dequantize(direction)

    def clip_wgrad(
        self,
        weights: Sequence[Tensor],
        wgrad: Tensor,
        amax: Tensor | None,
    ) -> Tensor:
        """Return the weight gradient as it is: the scale of a block clips nothing."""
        return wgrad

    @torch.inference_mode(False)  # an evaluation may come first, and training writes them
    def _lay_out(self, weights: Sequence[Tensor]) -> tuple[PortableStorage, MemberTable]:
        storage = PortableStorage(self.format, self.shape, name=self.name, device=weights[0].device)
        targets = (
            [storage.quantized]
            if weights[0].dim() == 3
            else [storage.expert(index).quantized for index in range(len(weights))]
        )
        entries = [
            TableEntry(
                parameter=self.name, source=weight.detach().view(target.shape), target=target
            )
            for weight, target in zip(weights, targets, strict=True)
        ]
        return storage, MemberTable.build(entries, backend=self.backend)
