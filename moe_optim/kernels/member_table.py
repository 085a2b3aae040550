"""Requantization of parameters, whole or sharded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat
from moe_optim.kernels.exchange import Exchange, plan_exchange
from moe_optim.kernels.finish_table import plan_finish
from moe_optim.kernels.launch_table import (
    LaunchTable,
    Planned,
    Range,
    can_launch,
    find_gaps,
    own_slots,
)
from moe_optim.kernels.plan import Backend, Call, Plan, takes_kernels
from moe_optim.kernels.table_entry import TableEntry, encode, find_maxima
from moe_optim.places import Places

__all__ = ["Backend", "MemberTable", "TableEntry"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemberTable(Plan):
    """Requantization of some parameters. Build it once with :meth:`build`.

    A launch writes the gathered buffers and zeroes ``consumed``; :attr:`finish` derives the
    remaining buffers after the gather. If shards cut blocks or experts, a launch raises
    LayoutError: instead, every rank launches :attr:`find_maxima`, all-reduces :attr:`exchange` with
    MAX, and launches :attr:`encode`.

    Kernels store the addresses of sources and buffers. Buffers must not move; sources may, and
    :attr:`has_moved` reports it.
    """

    entries: tuple[TableEntry, ...]
    """Parameters, in the order given to :meth:`build`."""
    consumed: Tensor | None
    """Memory to zero after reading: the sources and the gaps between them."""
    exchanges: tuple[Exchange, ...]
    """Maxima that each entry shares with other ranks."""
    exchange: Tensor
    """Maxima of blocks and experts on several ranks, [slots] fp32, in the same order on every rank;
    empty if no shard cuts any."""
    launches: tuple[LaunchTable, ...]
    """Tables of the entries that kernels handle, one per format and source dtype."""
    remainder: tuple[Planned, ...]
    """Entries that plain torch handles; all of them without a supported GPU."""
    find_maxima: Plan
    """Plan that writes this rank's share of :attr:`exchange`; NaN counts as zero."""
    encode: Plan
    """Plan that writes the owned data of every entry, and the scales of all partly owned blocks."""
    encode_unshared: Plan
    """Plan for after a step, whose kernels have encoded whole blocks: encodes the remaining entries
    that need no other rank, and writes this rank's share of :attr:`exchange`."""
    encode_shared: Plan
    """Plan that encodes the rest after a step, once :attr:`exchange` is reduced over all ranks."""
    finish: Plan
    """Plan that derives the buffers not gathered: columnwise copies of 2-D formats, and scales in
    storage."""

    @classmethod
    def build(
        cls,
        entries: Sequence[TableEntry],
        *,
        consumed: Tensor | None = None,
        backend: Backend = "auto",
    ) -> "MemberTable":
        """Check the entries, and assign them to kernels or plain torch.

        Args:
            entries: parameters of any shapes and formats; may be empty. If shards cut parameters,
                every rank passes the same ones in the same order with the same cuts, including
                those it owns nothing of.
            consumed: tensor of any shape and dtype over the memory that a launch zeroes, or None to
                leave sources unchanged.
            backend: ``auto`` for kernels where supported, ``reference`` for plain torch.

        Raises:
            ConfigError: unknown backend.
            LayoutError: a source has the wrong shape, dtype, strides or device for its target, or a
                range that does not run from one cut to another.
        """
        device = entries[0].source.device if entries else torch.device("cpu")
        runs_kernels = takes_kernels(backend, device)
        planned = _plan_exchanges(entries)
        slots = sum(shared.size for _, shared in planned)
        groups: dict[tuple[BlockScaledFormat, torch.dtype], list[Planned]] = {}
        remainder = []
        for entry, shared in planned:
            if runs_kernels and can_launch(entry):
                key = (entry.target.format, entry.source.dtype)
                groups.setdefault(key, []).append((entry, shared))
            else:
                remainder.append((entry, shared))
        owned = [own_slots(group) for group in groups.values()]
        amax = torch.zeros(slots + sum(owned), dtype=torch.float32, device=device)
        gaps = _gaps_to_zero(consumed, list(groups.values()))
        launches = [
            LaunchTable(
                group,
                amax,
                first_free_slot=slots + sum(owned[:index]),
                gaps=gaps,
            )
            for index, group in enumerate(groups.values())
        ]
        exchange = amax[:slots]
        maxima, encode, unshared, left = _plan_calls(launches, remainder, exchange, consumed)
        refuse = partial(_refuse_shared, slots)
        sources = Places.of_each_memory(entry.source for entry, _ in chain(*groups.values()))
        plan = partial(Plan, device=device, places=sources)
        return cls(
            device=device,
            calls=(refuse,) if slots else (*maxima, *encode),
            places=sources,
            entries=tuple(entries),
            consumed=consumed,
            exchanges=tuple(shared for _, shared in planned),
            exchange=exchange,
            launches=tuple(launches),
            remainder=tuple(remainder),
            find_maxima=plan(calls=maxima),
            encode=plan(calls=encode),
            encode_unshared=plan(calls=unshared),
            encode_shared=plan(calls=left),
            finish=plan_finish(entries, device, runs_kernels=runs_kernels),
        )

    @property
    def zeroes_in_launch(self) -> bool:
        """Whether kernels zero ``consumed``, including sources of the remainder."""
        return any(launch.zeroes for launch in self.launches)

    @property
    def num_members(self) -> int:
        """Number of experts in the table, over all parameters."""
        return sum(entry.target.shape[0] for entry in self.entries)


def _plan_exchanges(entries: Sequence[TableEntry]) -> list[Planned]:
    planned: list[Planned] = []
    slots = 0
    for entry in entries:
        entry.check()
        shared = plan_exchange(
            entry.target.format,
            entry.target.shape,
            entry.cuts,
            first=slots,
            shares_experts=entry.shares_experts,
            name=entry.parameter,
        )
        planned.append((entry, shared))
        slots += shared.size
    return planned


def _gaps_to_zero(
    consumed: Tensor | None, groups: Sequence[Sequence[Planned]]
) -> list[Range] | None:
    """Return what a launch zeroes besides its sources, or None if it cannot zero ``consumed``."""
    if consumed is None or len(groups) != 1 or any(shared.block_rows for _, shared in groups[0]):
        return None
    sources = [entry.source for entry, _ in groups[0]]
    return find_gaps(consumed, sources) if consumed.device == sources[0].device else None


def _plan_calls(
    launches: Sequence[LaunchTable],
    remainder: Sequence[Planned],
    exchange: Tensor,
    consumed: Tensor | None,
) -> tuple[tuple[Call, ...], ...]:
    """Return the calls of ``find_maxima``, ``encode``, ``encode_unshared`` and ``encode_shared``.

    Plain torch precedes kernels, which may zero the sources.
    """
    alone = [planned for planned in remainder if not planned[1].size]
    shared = [planned for planned in remainder if planned[1].size]

    def encoded(entries: Iterable[Planned]) -> list[Call]:
        return [partial(encode, *planned, exchange) for planned in entries]

    zero: list[Call] = [exchange.zero_] if exchange.numel() else []
    find: list[Call] = [partial(find_maxima, *planned, exchange) for planned in shared]
    clear: list[Call] = []
    if consumed is not None and not any(one.zeroes for one in launches):
        clear.append(consumed.zero_)
    experts = [call for one in launches for call in one.expert_maxima]
    cut = [call for one in launches for call in one.cut_maxima]
    whole = [call for one in launches for call in one.encode_whole]
    pieces = [call for one in launches for call in one.encode_cut]
    late = [call for one in launches if one.format.has_global_amax for call in one.encode_whole]
    return (
        (*zero, *find, *experts, *cut),
        (*encoded(remainder), *whole, *pieces, *clear),
        (*cut, *find, *encoded(alone)),
        (*late, *pieces, *encoded(shared)) if exchange.numel() else (),
    )


def _refuse_shared(count: int) -> None:
    raise LayoutError(
        f"requantize: expected shards of whole blocks and experts, got {count} maxima that "
        "several ranks share. Launch table.find_maxima, reduce table.exchange with MAX over the "
        "ranks, then launch table.encode."
    )
