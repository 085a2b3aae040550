"""Update of shards on the device, over flat ranges and over blocks that it then encodes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat
from moe_optim.kernels.adam_state import MasterState, Rule
from moe_optim.kernels.cutting import cut_ranges, int64
from moe_optim.kernels.exchange import AMAX_SLOTS, Exchange
from moe_optim.kernels.fields import STATE_FIELDS
from moe_optim.kernels.launch_table import LaunchTable, amax_part_length
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.plan import ALIGNMENT, Backend, BoundKernel, Call, Plan, takes_kernels
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import RANGE_PART, RANGE_TILE, UPDATE_TILES

DirectedRange = tuple[int, int, int, Tensor]
"""Index of a state, first and end element in it, and their direction, [end - first] bf16, fp16 or
fp32, contiguous."""

_DTYPES: Mapping[torch.dtype | None, str] = MappingProxyType(
    {None: "none", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
)
"""Dtypes as kernels name them."""


class Member(NamedTuple):
    """Entry of a requantization, whose whole blocks are encoded with the update."""

    entry: TableEntry
    exchange: Exchange
    """Maxima, with the amax slots of all experts."""
    launch: LaunchTable
    """Requantization that contains the entry."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatchedState[State: MasterState]:
    """State, and the member that its master is the source of if kernels encode it."""

    state: State
    member: Member | None = None
    has_kernels: bool = True
    """Whether kernels update the shard rather than plain torch."""

    def piece[Part: MasterState](self, first: int, state: Part) -> "MatchedState[Part]":
        """Return the elements from ``first`` on whose state is ``state``."""
        member = self.member
        if member is not None:
            start = member.entry.start + first
            member = member._replace(entry=replace(member.entry, source=state.master, start=start))
        return MatchedState(state=state, member=member, has_kernels=self.has_kernels)


_Members = list[tuple[MasterState, Member]]
_Ranges = defaultdict[tuple[tuple[str, Any], ...], list[list[int]]]
"""Constants of a launch over flat ranges -> its ranges: a row of STATE_FIELDS and the address of
the master, both of element 0 of the range; first and end element, elements per part, amax slot."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Updates[State: MasterState]:
    """Planner of the updates of some states by one rule. Build it once with :meth:`build`.

    Launching plans that together cover every element once, in any order, and then :attr:`finish`
    completes a step. The caller fills hyper-parameters and clip factors first.
    """

    rule: Rule
    hyper: Tensor
    clips: Tensor
    shards: tuple[MatchedState[State], ...]
    """States in the order given to :meth:`build`."""
    amax: Tensor | None
    """Slots that the exchanges of all members name, fp32, or None without members."""
    encodes_amaxes: bool
    """Whether formats with a global amax are encoded rather than left to an exchange."""
    finish: Plan
    """Encoding after all updates of what their kernels do not encode and no other rank shares."""
    written: set[bool]
    """Nonempty once a step has written masters, until the caller clears it."""

    @classmethod
    def build(
        cls,
        states: Sequence[State],
        hyper: Tensor,
        clips: Tensor,
        *,
        rule: Rule,
        members: Sequence[MemberTable] = (),
        backend: Backend = "auto",
    ) -> "Updates[State]":
        """Check the states, and match them with the members that they are the masters of.

        ``hyper``, [num_groups, HYPER_FIELDS] fp32, and ``clips``, [num_norms] fp32, are stored by
        reference; for the columns of a direction see ``fields``. A negative factor skips the
        update, and encodes the unchanged masters again. The sources of ``members`` are masters of
        some of the states; none of several tables may share maxima with other ranks. LayoutError
        for states with inconsistent tensors, or masters of members without a state.
        """
        for state in states:
            state.check()
        runs = {one.master.device: takes_kernels(backend, one.master.device) for one in states}
        matched = _match_members([one for one in states if runs[one.master.device]], members)
        amax = next((one.amax for table in members for one in table.launches), None)
        if len(members) > 1:
            matched, num_slots = _renumber_slots(matched)
            amax = torch.zeros(num_slots, dtype=torch.float32, device=hyper.device)
        return cls(
            rule=rule,
            hyper=hyper,
            clips=clips,
            shards=tuple(
                MatchedState(
                    state=state,
                    member=matched.get(state.master.data_ptr()),
                    has_kernels=runs[state.master.device],
                )
                for state in states
            ),
            amax=amax,
            encodes_amaxes=not any(table.exchange.numel() for table in members),
            finish=Plan(
                device=hyper.device,
                calls=tuple(call for table in members for call in table.encode_unshared.calls),
            ),
            written=set(),
        )

    def plan_along(self, ranges: Sequence[DirectedRange]) -> Plan:
        """Plan the update of some ranges along directions, and their encoding on the kernel path.

        Elements outside of the ranges are neither read nor written. A range of a member consists of
        whole block rows; for formats with a global amax, of whole experts.
        """
        shards = []
        for index, first, last, direction in ranges:
            shard = self.shards[index]
            shards.append(shard.piece(first, shard.state.along(first, last, direction)))
        return self.plan(shards)

    def plan[Part: MasterState](self, shards: "Sequence[MatchedState[Part]]") -> Plan:
        """Plan the update of shards in place, and the encoding that needs no other rank."""
        shards = [shard for shard in shards if shard.state.master.numel()]
        ranges: _Ranges = defaultdict(list)
        of_format: defaultdict[BlockScaledFormat, _Members] = defaultdict(list)
        for shard in shards:
            if shard.member is not None:
                of_format[shard.member.launch.format].append((shard.state, shard.member))
            elif shard.has_kernels:
                self._add_range(ranges, shard.state, 0, 0, shard.state.master.numel())
        encode: list[Call] = []
        updated: list[Call] = []
        for format, members in of_format.items():
            if format.has_global_amax:
                encode += self._encode_last(members, ranges)
            else:
                updated += self._update_members(format, members, ranges)
        kernels: list[Call] = [*self._update_ranges(ranges), *updated]
        if kernels:
            kernels.append(partial(self.written.add, True))
        others = [partial(self._update, shard.state) for shard in shards if not shard.has_kernels]
        return Plan(device=self.hyper.device, calls=(*kernels, *encode, *others))

    def _add_range(
        self, ranges: _Ranges, state: MasterState, base: int, first: int, last: int, slot: int = -1
    ) -> None:
        """Add elements ``first`` to ``last``, counted from ``base`` elements before a shard.

        ``slot`` is the first of ``AMAX_SLOTS`` for the parts of the range, negative for no amax.
        """
        if last <= first:
            return
        row = _row(state, base)
        master = state.master.data_ptr() - base * state.master.element_size()
        constants = {
            **self._constants(*_dtypes_of(state)),
            "WEIGHTS": _DTYPES[None if state.weight is None else state.weight.dtype],
            "AMAX": slot >= 0,
            "ALIGNED": not (master | row[0] | row[1] | row[2] | row[5]) % ALIGNMENT
            and not first % 16,
        }
        # amax parts match those of a requantization, which never writes the other slots
        length = RANGE_PART if slot < 0 else amax_part_length(last - first)
        ranges[tuple(constants.items())].append([*row, master, first, last, length, slot])

    def _update_ranges(self, ranges: _Ranges) -> Iterator[BoundKernel]:
        if not ranges:
            return
        from moe_optim.kernels.update_ranges import update_ranges_kernel

        amaxes = self.hyper if self.amax is None else self.amax  # placeholder, not written
        for constants, rows in ranges.items():
            table = int64(rows)
            states = table[:, :STATE_FIELDS]
            masters, first, last, length, slot = table[:, STATE_FIELDS:].unbind(1)
            which, numbers, _ = cut_ranges(last - first, length)
            start = first[which] + numbers * length[which]
            end = torch.minimum(start + length[which], last[which])
            parts = torch.stack([which, start, end, slot[which] + numbers], 1)
            yield BoundKernel(
                update_ranges_kernel,
                len(parts),
                *(one.contiguous().to(self.hyper.device) for one in (states, masters, parts)),
                self.hyper,
                self.clips,
                amaxes,
                num_warps=RANGE_TILE.num_warps,
                TILE=RANGE_TILE.cols,
                **dict(constants),
            )

    def _update_members(
        self, format: BlockScaledFormat, members: _Members, ranges: _Ranges
    ) -> Iterator[BoundKernel]:
        """Yield launches that update and encode whole blocks, and add the rest to ``ranges``."""
        by_dtypes: defaultdict[tuple[Any, Any], _Members] = defaultdict(list)
        for state, member in members:
            for part in member.entry.owned_parts():
                base = member.entry.start - part.base
                self._add_range(ranges, state, base, part.low, part.first_whole)
                self._add_range(ranges, state, base, part.end_whole, part.high)
            by_dtypes[_dtypes_of(state)].append((state, member))
        for (gradient, moments), alike in by_dtypes.items():
            planned = [(one.entry, one.exchange) for _, one in alike]
            tile = UPDATE_TILES[format.name, moments]
            table = LaunchTable(planned, alike[0][1].launch.amax, tile=tile)
            rows = int64(
                [
                    _row(state, one.entry.start - part.base)
                    for state, one in alike
                    for part in one.entry.owned_parts()
                ]
            )
            if table.num_tiles:
                yield table.bind(
                    rows.to(table.tiles.device),
                    self.hyper,
                    self.clips,
                    aligned=not bool((rows[:, :3] % ALIGNMENT).any()),
                    **self._constants(gradient, moments),
                )

    def _encode_last(self, members: _Members, ranges: _Ranges) -> Iterator[Call]:
        """Add experts to ``ranges``, which computes their amax, and yield the encoding launches."""
        for state, (entry, exchange, _) in members:
            for expert, part in zip(entry.owned_experts, entry.owned_parts(), strict=True):
                slot = exchange.experts[expert]
                self._add_range(ranges, state, entry.start - part.base, part.low, part.high, slot)
        if self.amax is None or not self.encodes_amaxes:
            return  # some amaxes need other ranks
        launch = members[0][1].launch
        planned = [(one.entry, one.exchange) for _, one in members]
        is_all = {id(entry) for entry, _ in planned} == {id(entry) for entry, _ in launch.planned}
        if not is_all or launch.amax is not self.amax:
            launch = LaunchTable(planned, self.amax)
        yield from (*launch.encode_whole, *launch.encode_cut)

    def _constants(self, gradient: torch.dtype, moments: torch.dtype | None) -> dict[str, Any]:
        return {"RULE": self.rule, "GRADIENT": _DTYPES[gradient], "MOMENTS": _DTYPES[moments]}

    def _update(self, state: MasterState) -> None:
        state.update(self.rule, self.hyper[state.group], self.clips[state.norm])
        self.written.add(True)
        if state.weight is not None:
            state.weight.copy_(state.master)


def _dtypes_of(state: MasterState) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtypes of gradient, or direction, and moments."""
    gradient, *moments = (one.dtype for one in state.inputs)
    return gradient, moments[0] if moments else None


def _row(state: MasterState, base: int) -> list[int]:
    """Return the state row of a shard, with addresses ``base`` elements before its first."""
    columns = [one.data_ptr() - base * one.element_size() for one in state.inputs]
    columns += [0] * (3 - len(columns))
    weight = state.weight
    place = 0 if weight is None else weight.data_ptr() - base * weight.element_size()
    return [*columns, state.group, state.norm, place]


def _match_members(
    states: Sequence[MasterState], tables: Sequence[MemberTable]
) -> dict[int, Member]:
    """Return the member of each master by its address; raise LayoutError for others."""
    masters = {state.master.data_ptr() for state in states if state.master.numel()}
    found: dict[int, Member] = {}
    missing = []
    for launch in chain.from_iterable(table.launches for table in tables):
        slots = iter(launch.amax_slots)
        for entry, exchange in launch.planned:
            named = {expert: next(slots) for expert in entry.owned_experts}
            address = entry.source.data_ptr()
            found[address] = Member(entry, replace(exchange, experts=named), launch)
            if address not in masters:
                missing.append(entry.parameter)
    if missing:
        raise LayoutError(
            f"{', '.join(missing)}: expected states whose masters are the sources of the "
            "members, got none for these. Name every master, and use one backend for both."
        )
    return found


def _renumber_slots(members: Mapping[int, Member]) -> tuple[dict[int, Member], int]:
    """Give every expert that needs an amax slots in one tensor; return the members and its size."""
    renumbered, num_slots = {}, 0
    for address, member in members.items():
        experts = member.entry.owned_experts if member.launch.format.has_global_amax else range(0)
        first, num_slots = num_slots, num_slots + AMAX_SLOTS * len(experts)
        named = dict(zip(experts, range(first, num_slots, AMAX_SLOTS), strict=True))
        exchange = replace(member.exchange, experts=named)
        renumbered[address] = member._replace(exchange=exchange)
    return renumbered, num_slots
