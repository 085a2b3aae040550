"""Update of shards on the device: Adam over flat ranges, and over blocks encoded with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe_optim.formats.reference.adam import step_into
from moe_optim.kernels import staging
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.cutting import int64
from moe_optim.kernels.launch_table import LaunchTable, Planned, amax_part_length
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.plan import ALIGNMENT, BoundKernel, Call, Plan
from moe_optim.kernels.tuning import ADAM_PART, ADAM_TILE, STEP_TILES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """State, and the member entry of its master if kernels encode it."""

    state: AdamState
    planned: Planned | None = None
    """Entry, with the amax slots of all its experts."""
    launch: LaunchTable | None = None
    """Requantization that contains the entry."""
    has_kernels: bool = True
    """Whether kernels step the shard rather than plain torch."""

    @property
    def is_staged(self) -> bool:
        """Whether the shard is copied to the device for its step."""
        return self.state.on_host is not None and self.state.master.numel() >= staging.SMALLEST

    def ends(self) -> list[int]:
        """Return the elements at which chunks may end, at whole blocks or experts, and its end."""
        numel = self.state.master.numel()
        length = staging.CHUNK_BYTES // self.state.element_bytes
        length = max(1, length // ADAM_PART) * ADAM_PART
        if self.planned is None:
            return [*range(length, numel, length), numel]
        entry, _ = self.planned
        block_row = entry.target.format.block_row_height * entry.target.shape[2]
        length = max(1, length // block_row) * block_row
        ends: list[int] = []
        for part in entry.owned_parts():
            base = part.base - entry.start
            if not entry.target.format.has_global_amax:
                first = (part.low // length + 1) * length
                ends += range(base + first, base + part.high, length)
            ends.append(base + part.high)
        return ends

    def piece(self, first: int, last: int, there: Sequence[Tensor]) -> "Shard":
        """Return elements ``first`` to ``last``, with master and moments replaced by ``there``."""
        here, state, planned = slice(first, last), self.state, self.planned
        if planned is not None:
            entry, exchange = planned
            planned = replace(entry, source=there[0], start=entry.start + first), exchange
        state = replace(
            state,
            master=there[0],
            gradient=state.gradient[here],
            exp_avg=there[1],
            exp_avg_sq=there[2],
            weight=None if state.weight is None else state.weight[here],
            on_host=None,
        )
        return replace(self, state=state, planned=planned)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Updates:
    """Planner of updates that share hyper-parameters."""

    hyper: Tensor
    clips: Tensor
    members: MemberTable | None
    decoupled: bool
    written: set[bool]

    def plan(self, shards: Sequence[Shard]) -> Plan:
        """Plan the step of shards in place, and the encoding that needs no other rank."""
        ranges = _Ranges()
        of_launch: dict[LaunchTable, list[tuple[Planned, AdamState]]] = {}
        for shard in shards:
            if shard.launch is not None and shard.planned is not None:
                of_launch.setdefault(shard.launch, []).append((shard.planned, shard.state))
            elif shard.has_kernels:
                ranges.add(shard.state, 0, 0, shard.state.master.numel())
        encode: list[Call] = []
        for launch, group in of_launch.items():
            if launch.format.has_global_amax:
                encode += self._encode_last(launch, group, ranges)
        stepped = [
            kernel
            for launch, group in of_launch.items()
            if not launch.format.has_global_amax
            for kernel in self._step_members(launch, group, ranges)
        ]
        kernels: list[Call] = [*self._step_ranges(ranges), *stepped]
        if kernels:
            kernels.append(partial(self.written.add, True))
        others = [partial(self._step, shard.state) for shard in shards if not shard.has_kernels]
        return Plan(device=self.hyper.device, calls=(*kernels, *encode, *others))

    def _step_ranges(self, ranges: "_Ranges") -> Iterator[BoundKernel]:
        """Yield one launch per kind of range; amax parts match those of a requantization."""
        from moe_optim.kernels.adam_kernel import adam_kernel

        launches = () if self.members is None else self.members.launches
        amaxes = launches[0].amax if launches else self.hyper  # placeholder, not written
        for kind, table in ranges.kinds.items():
            columns = (table.states, table.masters, table.parts)
            states, masters, parts = (int64(rows).to(self.hyper.device) for rows in columns)
            yield BoundKernel(
                adam_kernel,
                len(parts),
                states,
                masters,
                parts,
                self.hyper,
                self.clips,
                amaxes,
                TILE=ADAM_TILE.cols,
                GRADIENT_FP32=kind.gradient == torch.float32,
                MOMENTS_FP32=kind.moments == torch.float32,
                DECOUPLED=self.decoupled,
                ALIGNED=kind.aligned,
                WEIGHTS={None: "none", torch.bfloat16: "bf16", torch.float32: "fp32"}[kind.weight],
                AMAX=kind.finds_amax,
                num_warps=ADAM_TILE.num_warps,
            )

    def _step_members(
        self,
        launch: LaunchTable,
        group: Sequence[tuple[Planned, AdamState]],
        ranges: "_Ranges",
    ) -> Iterator[BoundKernel]:
        """Yield launches that step and encode whole blocks, and add the rest to ``ranges``."""
        by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[tuple[Planned, AdamState]]] = {}
        for (entry, exchange), state in group:
            for part in entry.owned_parts():
                base = entry.start - part.base
                ranges.add(state, base, part.low, part.first_whole)
                ranges.add(state, base, part.end_whole, part.high)
            dtypes = (state.gradient.dtype, state.exp_avg.dtype)
            by_dtypes.setdefault(dtypes, []).append(((entry, exchange), state))
        for (gradients, moments), members in by_dtypes.items():
            planned = [one for one, _ in members]
            tile = STEP_TILES[launch.format.name, moments]
            table = LaunchTable.build(planned, launch.amax, tile=tile)
            rows = int64(
                [
                    _row(state, entry.start - part.base)
                    for (entry, _), state in members
                    for part in entry.owned_parts()
                ]
            )
            if table.num_tiles:
                yield table.bind_whole(
                    rows.to(table.tiles.device),
                    self.hyper,
                    self.clips,
                    aligned=table.aligned and not bool((rows[:, :3] % ALIGNMENT).any()),
                    GRADIENT_FP32=gradients == torch.float32,
                    MOMENTS_FP32=moments == torch.float32,
                    DECOUPLED=self.decoupled,
                )

    def _encode_last(
        self,
        launch: LaunchTable,
        group: Sequence[tuple[Planned, AdamState]],
        ranges: "_Ranges",
    ) -> Iterator[BoundKernel]:
        """Add experts to ``ranges``, which computes their amax, and yield the encoding launches."""
        for (entry, exchange), state in group:
            for expert, part in zip(entry.owned_experts, entry.owned_parts(), strict=True):
                base = entry.start - part.base
                ranges.add(state, base, part.low, part.high, exchange.experts[expert])
        if self.members is None or self.members.exchange.numel():
            return  # some amaxes need other ranks
        planned = [one for one, _ in group]
        is_all = [entry for entry, _ in planned] == [entry for entry, _ in launch.planned]
        table = launch if is_all else LaunchTable.build(planned, launch.amax)
        yield from table.bind_encoding()

    def _step(self, state: AdamState) -> None:
        step_into(  # .data: as with kernels, version counters count only other writes
            *(state.master.data, state.gradient, state.exp_avg, state.exp_avg_sq),
            hyper=self.hyper[state.group],
            clip=self.clips[state.norm],
            decoupled=self.decoupled,
        )
        self.written.add(True)
        if state.weight is not None:
            state.weight.copy_(state.master)


class _Kind(NamedTuple):
    """Properties that all ranges of a launch share."""

    gradient: torch.dtype
    moments: torch.dtype
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

    def add(self, state: AdamState, base: int, first: int, last: int, slot: int = -1) -> None:
        """Add elements ``first`` to ``last``, counted from ``base`` elements before a shard.

        ``slot`` is the first of ``AMAX_SLOTS`` for the parts of the range, negative for no amax.
        """
        if last <= first:
            return
        row = _row(state, base)
        master = state.master.data_ptr() - base * state.master.element_size()
        kind = _Kind(
            gradient=state.gradient.dtype,
            moments=state.exp_avg.dtype,
            weight=None if state.weight is None else state.weight.dtype,
            finds_amax=slot >= 0,
            aligned=not (master | row[0] | row[1] | row[2] | row[5]) % ALIGNMENT and not first % 16,
        )
        table = self.kinds.setdefault(kind, _RangeTable())
        # amax parts match those of a requantization, which never writes the other slots
        length = amax_part_length(last - first) if kind.finds_amax else ADAM_PART
        for number, start in enumerate(range(first, last, length)):
            part = [len(table.states), start, min(last, start + length), slot + number]
            table.parts.append(part)
        table.states.append(row)
        table.masters.append(master)


def _row(state: AdamState, base: int) -> list[int]:
    """Return the state row of a shard, with addresses ``base`` elements before its first."""
    columns = [
        tensor.data_ptr() - base * tensor.element_size()
        for tensor in (state.gradient, state.exp_avg, state.exp_avg_sq)
    ]
    weight = state.weight
    place = 0 if weight is None else weight.data_ptr() - base * weight.element_size()
    return [*columns, state.group, state.norm, place]
