"""Update of shards on the device, over flat ranges and over blocks that it then encodes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat
from moe_optim.kernels.cutting import int64
from moe_optim.kernels.exchange import Exchange
from moe_optim.kernels.launch_table import LaunchTable, Planned, amax_part_length
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.plan import ALIGNMENT, Backend, BoundKernel, Call, Plan, takes_kernels
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import RANGE_PART, RANGE_TILE, UPDATE_TILES

Rule = Literal["adamw", "adam", "direction"]
"""Rule: Adam with decoupled or coupled weight decay, or a step along a given direction."""

_DTYPES: Mapping[torch.dtype | None, str] = MappingProxyType(
    {None: "none", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
)
"""Dtypes as kernels name them."""


class OwnedState(Protocol):
    """Owned elements of one parameter, with their masters."""

    @property
    def parameter(self) -> str:
        """Parameter name, for errors."""

    @property
    def master(self) -> Tensor:
        """Master weights, [n] fp32."""


class UpdatedState(OwnedState, Protocol):
    """Tensors that an update of one rule reads and writes."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Gradient and both moments, or the direction; [n] each, the moments in one dtype."""

    @property
    def weight(self) -> Tensor | None:
        """Copy of the new masters, [n] fp32 or bf16, or None."""

    @property
    def group(self) -> int:
        """Row of the hyper-parameters."""

    @property
    def norm(self) -> int:
        """Index of the clip factor."""

    def update(self, rule: Rule, hyper: Tensor, clip: Tensor) -> None:
        """Update the masters in plain torch, with a row of hyper-parameters and a clip factor."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard[State: OwnedState]:
    """State, and the member entry of its master if kernels encode it."""

    state: State
    planned: Planned | None = None
    """Entry, with the amax slots of all its experts."""
    launch: LaunchTable | None = None
    """Requantization that contains the entry."""
    has_kernels: bool = True
    """Whether kernels update the shard rather than plain torch."""

    def piece[Part: OwnedState](self, first: int, state: Part) -> "Shard[Part]":
        """Return the elements from ``first`` on whose state is ``state``."""
        planned = self.planned
        if planned is not None:
            entry, exchange = planned
            planned = replace(entry, source=state.master, start=entry.start + first), exchange
        return Shard(state=state, planned=planned, launch=self.launch, has_kernels=self.has_kernels)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Updates:
    """Planner of updates that share a rule and its hyper-parameters."""

    rule: Rule
    hyper: Tensor
    clips: Tensor
    amax: Tensor | None
    """Slots that the exchanges of all members name, fp32, or None without members."""
    encodes_amaxes: bool = True
    """Whether formats with a global amax are encoded rather than left to an exchange."""
    written: set[bool]

    def plan(self, shards: "Sequence[Shard[UpdatedState]]") -> Plan:
        """Plan the update of shards in place, and the encoding that needs no other rank."""
        ranges = _Ranges()
        of_format: dict[BlockScaledFormat, list[_Member]] = {}
        for shard in shards:
            if shard.launch is not None and shard.planned is not None:
                member = _Member(*shard.planned, shard.state, shard.launch)
                of_format.setdefault(shard.launch.format, []).append(member)
            elif shard.has_kernels:
                ranges.add(shard.state, 0, 0, shard.state.master.numel())
        encode: list[Call] = []
        for format, group in of_format.items():
            if format.has_global_amax:
                encode += self._encode_last(group, ranges)
        updated = [
            kernel
            for format, group in of_format.items()
            if not format.has_global_amax
            for kernel in self._update_members(format, group, ranges)
        ]
        kernels: list[Call] = [*self._update_ranges(ranges), *updated]
        if kernels:
            kernels.append(partial(self.written.add, True))
        others = [partial(self._update, shard.state) for shard in shards if not shard.has_kernels]
        return Plan(device=self.hyper.device, calls=(*kernels, *encode, *others))

    def _update_ranges(self, ranges: "_Ranges") -> Iterator[BoundKernel]:
        """Yield one launch per kind of range; amax parts match those of a requantization."""
        if not ranges.kinds:
            return
        from moe_optim.kernels.update_ranges import update_ranges_kernel

        amaxes = self.hyper if self.amax is None else self.amax  # placeholder, not written
        for kind, table in ranges.kinds.items():
            columns = (table.states, table.masters, table.parts)
            states, masters, parts = (int64(rows).to(self.hyper.device) for rows in columns)
            yield BoundKernel(
                update_ranges_kernel,
                len(parts),
                states,
                masters,
                parts,
                self.hyper,
                self.clips,
                amaxes,
                num_warps=RANGE_TILE.num_warps,
                TILE=RANGE_TILE.cols,
                ALIGNED=kind.aligned,
                WEIGHTS=_DTYPES[kind.weight],
                AMAX=kind.finds_amax,
                **self._constants(kind.dtypes),
            )

    def _update_members(
        self, format: BlockScaledFormat, group: "Sequence[_Member]", ranges: "_Ranges"
    ) -> Iterator[BoundKernel]:
        """Yield launches that update and encode whole blocks, and add the rest to ``ranges``."""
        by_dtypes: dict[_Dtypes, list[_Member]] = {}
        for member in group:
            state = member.state
            for part in member.entry.owned_parts():
                base = member.entry.start - part.base
                ranges.add(state, base, part.low, part.first_whole)
                ranges.add(state, base, part.end_whole, part.high)
            by_dtypes.setdefault(_Dtypes.of(state), []).append(member)
        for dtypes, members in by_dtypes.items():
            planned = [(one.entry, one.exchange) for one in members]
            tile = UPDATE_TILES[format.name, dtypes.moments]
            table = LaunchTable.build(planned, members[0].launch.amax, tile=tile)
            rows = int64(
                [
                    _row(one.state, one.entry.start - part.base)
                    for one in members
                    for part in one.entry.owned_parts()
                ]
            )
            if table.num_tiles:
                yield table.bind_whole(
                    rows.to(table.tiles.device),
                    self.hyper,
                    self.clips,
                    aligned=table.aligned and not bool((rows[:, :3] % ALIGNMENT).any()),
                    **self._constants(dtypes),
                )

    def _encode_last(self, group: "Sequence[_Member]", ranges: "_Ranges") -> Iterator[BoundKernel]:
        """Add experts to ``ranges``, which computes their amax, and yield the encoding launches."""
        for entry, exchange, state, _ in group:
            for expert, part in zip(entry.owned_experts, entry.owned_parts(), strict=True):
                base = entry.start - part.base
                ranges.add(state, base, part.low, part.high, exchange.experts[expert])
        if self.amax is None or not self.encodes_amaxes:
            return  # some amaxes need other ranks
        launch = group[0].launch
        planned = [(one.entry, one.exchange) for one in group]
        is_all = [one.entry for one in group] == [entry for entry, _ in launch.planned]
        if not is_all or launch.amax is not self.amax:
            launch = LaunchTable.build(planned, self.amax)
        yield from launch.bind_encoding()

    def _constants(self, dtypes: "_Dtypes") -> dict[str, Any]:
        gradient, moments = (_DTYPES[one] for one in dtypes)
        return {"RULE": self.rule, "GRADIENT": gradient, "MOMENTS": moments}

    def _update(self, state: UpdatedState) -> None:
        state.update(self.rule, self.hyper[state.group], self.clips[state.norm])
        self.written.add(True)
        if state.weight is not None:
            state.weight.copy_(state.master)


class _Member(NamedTuple):
    """Entry whose blocks are encoded, with its maxima and its state."""

    entry: TableEntry
    exchange: Exchange
    state: UpdatedState
    launch: LaunchTable


class _Dtypes(NamedTuple):
    """Dtypes of the inputs of an update."""

    gradient: torch.dtype
    moments: torch.dtype | None

    @classmethod
    def of(cls, state: UpdatedState) -> "_Dtypes":
        gradient, *moments = (one.dtype for one in state.inputs)
        return cls(gradient, moments[0] if moments else None)


class _Kind(NamedTuple):
    """Properties that all ranges of a launch share."""

    dtypes: _Dtypes
    weight: torch.dtype | None
    finds_amax: bool
    aligned: bool


@dataclass(frozen=True, slots=True)
class _RangeTable:
    """Flat ranges of one kind, as kernels read them."""

    states: list[list[int]] = field(default_factory=list)
    """Rows of STATE_FIELDS, see ``fields``; addresses are those of element 0 of the range."""
    masters: list[int] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    """Range, first element, end element, and amax slot of each part."""


class _Ranges:
    """Collector of ranges, grouped by launch."""

    def __init__(self) -> None:
        self.kinds: dict[_Kind, _RangeTable] = {}

    def add(self, state: UpdatedState, base: int, first: int, last: int, slot: int = -1) -> None:
        """Add elements ``first`` to ``last``, counted from ``base`` elements before a shard.

        ``slot`` is the first of ``AMAX_SLOTS`` for the parts of the range, negative for no amax.
        """
        if last <= first:
            return
        row = _row(state, base)
        master = state.master.data_ptr() - base * state.master.element_size()
        kind = _Kind(
            dtypes=_Dtypes.of(state),
            weight=None if state.weight is None else state.weight.dtype,
            finds_amax=slot >= 0,
            aligned=not (master | row[0] | row[1] | row[2] | row[5]) % ALIGNMENT and not first % 16,
        )
        table = self.kinds.setdefault(kind, _RangeTable())
        # amax parts match those of a requantization, which never writes the other slots
        length = amax_part_length(last - first) if kind.finds_amax else RANGE_PART
        for number, start in enumerate(range(first, last, length)):
            part = [len(table.states), start, min(last, start + length), slot + number]
            table.parts.append(part)
        table.states.append(row)
        table.masters.append(master)


def _row(state: UpdatedState, base: int) -> list[int]:
    """Return the state row of a shard, with addresses ``base`` elements before its first."""
    columns = [one.data_ptr() - base * one.element_size() for one in state.inputs]
    columns += [0] * (3 - len(columns))
    weight = state.weight
    place = 0 if weight is None else weight.data_ptr() - base * weight.element_size()
    return [*columns, state.group, state.norm, place]


def match_members[State: OwnedState](
    owned: Sequence[State], tables: Sequence[MemberTable], backend: Backend
) -> Iterator[Shard[State]]:
    """Yield the states of members, with their entries, then all other states."""
    runs = {state.master.device: takes_kernels(backend, state.master.device) for state in owned}
    launched = {one.master.data_ptr(): one for one in owned if runs[one.master.device]}
    for launch in chain.from_iterable(table.launches for table in tables):
        slots = iter(launch.amax_slots)
        found = [launched.pop(entry.source.data_ptr(), None) for entry, _ in launch.planned]
        missing = []
        for (entry, exchange), state in zip(launch.planned, found, strict=True):
            named = {expert: next(slots) for expert in entry.owned_experts}
            planned = entry, replace(exchange, experts=named)
            if state is None:
                missing.append(entry.parameter)
            else:
                yield Shard(state=state, planned=planned, launch=launch)
        if missing:
            raise LayoutError(
                f"{', '.join(missing)}: expected states whose masters are the sources of the "
                "members, got none for these. Name every master, and take one backend for both."
            )
    yield from (Shard(state=state) for state in launched.values())
    for state in owned:
        if not runs[state.master.device]:
            yield Shard(state=state, has_kernels=False)
