"""Quantized copies of bf16 weights, for products in a narrow format."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_optim import ops
from moe_optim.formats import BlockScaledFormat, Direction
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.modules.storage import PortableStorage


class QuantizedCopy:
    """What products read in place of bf16 weights: their values, quantized in one call.

    In training the copy is kept until an optimizer steps, or until a weight is written or laid
    elsewhere, so the micro-batches of a step share one requantization. Steps are counted because
    torch does not see them: optimizer and gather write through the buffer that weights are views
    of. Elsewhere every read makes the copy anew, so that weights may be exchanged through ``data``,
    which torch does not see either.

    Args:
        format: of the copy.
        shape: [E, R, C] of all weights.
        name: for errors.

    Raises:
        LayoutError: the shape does not fit the format.
    """

    def __init__(self, format: BlockScaledFormat, shape: tuple[int, int, int], name: str) -> None:
        format.check_shape(shape, name)
        self.format = format
        self.shape = shape
        self.name = name
        self._storage: PortableStorage | None = None
        self._table: MemberTable | None = None
        self._places: tuple[int, ...] = ()  # where the weights lay when the table was built
        self._made_of: tuple[int, ...] | None = None  # steps, and how often each weight was written

    def __reduce__(self) -> Any:
        """Copy and pickle what it is, without the planes: they follow from the weights."""
        return QuantizedCopy, (self.format, self.shape, self.name)

    @torch.no_grad()
    def dequantize(self, weights: Sequence[Tensor], direction: Direction, *, keep: bool) -> Tensor:
        """Return the values of one direction.

        Args:
            weights: one bf16 tensor [E, R, C], or E of [R, C]; contiguous.
            direction: rowwise for the forward product, columnwise for dgrad.
            keep: whether the copy may be that of an earlier read, and be read again.

        Returns:
            [E, R, C] bf16, newly allocated.
        """
        places = tuple(weight.data_ptr() for weight in weights)
        if self._storage is None or self._table is None or places != self._places:
            self._storage, self._table = self._lay_out(weights)
            self._places, self._made_of = places, None
        now = (_step_count().steps, *(weight._version for weight in weights))
        if not keep or now != self._made_of:
            ops.requantize(self._table)
            ops.finish_gather(self._table)
            self._made_of = now if keep else None
        return self._storage.dequantize(direction)

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
        return storage, MemberTable.build(entries)


class _StepCount:
    """How often any optimizer of this process has stepped."""

    def __init__(self) -> None:
        self.steps = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.steps += 1


@cache
def _step_count() -> _StepCount:
    return _StepCount()
