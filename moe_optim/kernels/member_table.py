"""What one requantization reads and writes, fixed when the parameters are laid out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import QuantizedWeight
from moe_optim.kernels.launch_table import LaunchTable, can_launch, find_gaps


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
    """All parameters of one launch. Build it once with :meth:`build`; launching plans nothing.

    On a GPU it holds the addresses of its tensors. Storages must therefore stay where they are;
    sources that have moved, and come back to the same tensors, are noticed.
    """

    entries: tuple[TableEntry, ...]
    consumed: Tensor | None
    """Memory to zero once its values have been read: the sources and the gaps between them."""
    launches: tuple[LaunchTable, ...]
    """Device descriptors of the entries that kernels handle, one launch a dtype of sources."""
    remainder: tuple[TableEntry, ...]
    """The entries that no launch handles; all of them without a suitable GPU."""

    @classmethod
    def build(
        cls, entries: Sequence[TableEntry], *, consumed: Tensor | None = None
    ) -> "MemberTable":
        """Check the entries, decide which of them a kernel handles, and freeze them.

        Args:
            entries: may be of different shapes and formats, and may be none at all.
            consumed: any tensor that covers what a launch uses up, or None to leave sources alone.

        Raises:
            LayoutError: a source has the wrong shape, dtype, strides or device for its target.
        """
        for entry in entries:
            _check(entry)
        by_dtype: dict[torch.dtype, list[tuple[Tensor, QuantizedWeight]]] = {}
        remainder = []
        for entry in entries:
            if _has_kernels(entry.source.device) and can_launch(entry.source, entry.target):
                pairs = by_dtype.setdefault(entry.source.dtype, [])
                pairs.append((entry.source, entry.target))
            else:
                remainder.append(entry)
        zeroed = consumed if _can_zero_in_launch(consumed, list(by_dtype.values())) else None
        return cls(
            entries=tuple(entries),
            consumed=consumed,
            launches=tuple(
                LaunchTable.build(pairs, consumed=zeroed) for pairs in by_dtype.values()
            ),
            remainder=tuple(remainder),
        )

    @property
    def zeroes_in_launch(self) -> bool:
        """Whether the launches leave ``consumed`` as zeros, sources of the remainder included."""
        return any(launch.zeroes for launch in self.launches)

    @property
    def has_moved(self) -> bool:
        """Whether sources have moved since, so that no launch may be made."""
        return any(launch.has_moved for launch in self.launches)

    @property
    def num_members(self) -> int:
        """Number of experts in the table, over all parameters."""
        return sum(entry.target.shape[0] for entry in self.entries)


def _can_zero_in_launch(
    consumed: Tensor | None, pairs: Sequence[Sequence[tuple[Tensor, QuantizedWeight]]]
) -> bool:
    if consumed is None or len(pairs) != 1:
        return False
    sources = [source for source, _ in pairs[0]]
    return consumed.device == sources[0].device and find_gaps(consumed, sources) is not None


@cache
def _has_kernels(device: torch.device) -> bool:
    """Return whether Triton can encode E4M3 on ``device``."""
    return (
        device.type == "cuda"
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )


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
