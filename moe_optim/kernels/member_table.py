"""What one requantization reads and writes, fixed when the parameters are laid out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import QuantizedWeight


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableEntry:
    """The experts of one parameter: where their new values lie and which storage takes them."""

    parameter: str
    """Name, for errors."""
    source: Tensor
    """[E, R, C] fp32 or bf16, contiguous; a view, so its memory is the caller's."""
    target: QuantizedWeight
    """Planes that are overwritten."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemberTable:
    """All parameters of one launch. Build it once with :meth:`build`; launching plans nothing."""

    entries: tuple[TableEntry, ...]
    consumed: Tensor | None
    """Memory to zero once its values have been read: the sources and the gaps between them."""

    @classmethod
    def build(
        cls, entries: Sequence[TableEntry], *, consumed: Tensor | None = None
    ) -> "MemberTable":
        """Check the entries and freeze them.

        Args:
            entries: may be of different shapes and formats, and may be none at all.
            consumed: any tensor that covers what a launch uses up, or None to leave sources alone.

        Raises:
            LayoutError: a source has the wrong shape, dtype, strides or device for its target.
        """
        for entry in entries:
            _check(entry)
        return cls(entries=tuple(entries), consumed=consumed)

    @property
    def num_members(self) -> int:
        """Number of experts in the table, over all parameters."""
        return sum(entry.target.shape[0] for entry in self.entries)


def _check(entry: TableEntry) -> None:
    source, target = entry.source, entry.target
    if tuple(source.shape) != target.shape:
        raise LayoutError(
            f"{entry.parameter}: expected a source of shape {list(target.shape)}, got "
            f"{list(source.shape)}. View the parameter's range as its logical shape."
        )
    if source.dtype not in (torch.float32, torch.bfloat16) or not source.is_contiguous():
        raise LayoutError(
            f"{entry.parameter}: expected a contiguous fp32 or bf16 source, got {source.dtype} "
            f"with strides {list(source.stride())}."
        )
    if source.device != target.rowwise_data.device:
        raise LayoutError(
            f"{entry.parameter}: expected source and storage on one device, got {source.device} "
            f"and {target.rowwise_data.device}."
        )
