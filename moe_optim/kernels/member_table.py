"""What one requantization reads and writes, fixed when the parameters are laid out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_optim.errors import ConfigError
from moe_optim.formats import BlockScaledFormat
from moe_optim.kernels.exchange import Exchange, plan_exchange
from moe_optim.kernels.finish_table import FinishTable, can_finish
from moe_optim.kernels.launch_table import LaunchTable, Planned, can_launch, find_gaps, own_slots
from moe_optim.kernels.table_entry import TableEntry

__all__ = ["Backend", "MemberTable", "TableEntry"]

Backend = Literal["auto", "reference"]
"""Who quantizes: kernels where they run, or plain torch everywhere."""
_BACKENDS = get_args(Backend)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemberTable:
    """All parameters of one launch. Build it once with :meth:`build`; launching plans nothing.

    On a GPU it holds the addresses of its tensors. Storages must therefore stay where they are;
    sources that have moved, and come back to the same tensors, are noticed.
    """

    entries: tuple[TableEntry, ...]
    """The parameters, in the order in which they were given."""
    consumed: Tensor | None
    """Memory to zero once its values have been read: the sources and the gaps between them."""
    exchanges: tuple[Exchange, ...]
    """What each entry shares with other ranks."""
    exchange: Tensor
    """[slots] fp32: maxima of blocks and experts that lie on several ranks, for one MAX all-reduce
    between ``partial_amax`` and ``encode``. The same length and order on every rank; empty where no
    shard cuts anything."""
    launches: tuple[LaunchTable, ...]
    """Device descriptors of the entries that kernels handle: one a format and dtype of sources."""
    remainder: tuple[tuple[TableEntry, Exchange], ...]
    """The entries that no launch handles; all of them without a suitable GPU."""
    finishes: tuple[FinishTable, ...]
    """Device descriptors of what is derived after a gather: one a format."""
    unfinished: tuple[TableEntry, ...]
    """The entries whose derived buffers no launch handles."""

    @classmethod
    def build(
        cls,
        entries: Sequence[TableEntry],
        *,
        consumed: Tensor | None = None,
        backend: Backend = "auto",
    ) -> "MemberTable":
        """Check the entries, decide which of them a kernel handles, and freeze them.

        Args:
            entries: may be of different shapes and formats, and may be none at all. Where shards
                cut parameters, every rank names the same ones in the same order, with the same
                cuts, those it owns nothing of included.
            consumed: a tensor of any shape and dtype that covers what a launch uses up, or None to
                leave sources alone.
            backend: ``auto`` takes kernels where they run, ``reference`` does without them.

        Raises:
            ConfigError: no such backend.
            LayoutError: a source has the wrong shape, dtype, strides or device for its target, or
                a range does not run from one cut to another.
        """
        check_backend(backend)
        planned: list[Planned] = []
        slots = 0
        for entry in entries:
            entry.check()
            target = entry.target
            shared = plan_exchange(
                target.format,
                target.shape,
                entry.cuts,
                first=slots,
                shares_experts=entry.shares_experts,
                name=entry.parameter,
            )
            planned.append((entry, shared))
            slots += shared.size
        groups: dict[tuple[BlockScaledFormat, torch.dtype], list[Planned]] = {}
        remainder = []
        for entry, shared in planned:
            if backend == "auto" and has_kernels(entry.source.device) and can_launch(entry):
                key = (entry.target.format, entry.source.dtype)
                groups.setdefault(key, []).append((entry, shared))
            else:
                remainder.append((entry, shared))
        owned = [own_slots(group) for group in groups.values()]
        device = entries[0].source.device if entries else None
        amax = torch.zeros(slots + sum(owned), dtype=torch.float32, device=device)
        zeroed = consumed if _can_zero_in_launch(consumed, list(groups.values())) else None
        finishes, unfinished = _plan_finish(entries, backend)
        return cls(
            entries=tuple(entries),
            consumed=consumed,
            exchanges=tuple(shared for _, shared in planned),
            exchange=amax[:slots],
            launches=tuple(
                LaunchTable.build(
                    group,
                    amax,
                    first_free_slot=slots + sum(owned[:index]),
                    consumed=zeroed,
                )
                for index, group in enumerate(groups.values())
            ),
            remainder=tuple(remainder),
            finishes=finishes,
            unfinished=unfinished,
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


def check_backend(backend: str) -> None:
    """Raise ConfigError for what is no backend."""
    if backend not in _BACKENDS:
        raise ConfigError(
            f"backend: expected {' or '.join(_BACKENDS)}, got '{backend}'. Write auto, "
            "which takes kernels where they run."
        )


def _plan_finish(
    entries: Sequence[TableEntry], backend: Backend
) -> tuple[tuple[FinishTable, ...], tuple[TableEntry, ...]]:
    by_format: dict[BlockScaledFormat, list[TableEntry]] = {}
    unfinished = []
    for entry in entries:
        if backend == "auto" and has_kernels(entry.source.device) and can_finish(entry):
            by_format.setdefault(entry.target.format, []).append(entry)
        else:
            unfinished.append(entry)
    tables = [FinishTable.build(group) for group in by_format.values()]
    return tuple(table for table in tables if table is not None), tuple(unfinished)


def _can_zero_in_launch(consumed: Tensor | None, groups: Sequence[Sequence[Planned]]) -> bool:
    if consumed is None or len(groups) != 1 or any(shared.block_rows for _, shared in groups[0]):
        return False
    sources = [entry.source for entry, _ in groups[0]]
    return consumed.device == sources[0].device and find_gaps(consumed, sources) is not None


def runs_triton(device: torch.device) -> bool:
    """Return whether any kernel of this package runs on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether Triton can encode E4M3 on ``device``."""
    return runs_triton(device) and torch.cuda.get_device_capability(device) >= (8, 9)
