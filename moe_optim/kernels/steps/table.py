"""What one update of masters reads and writes, fixed when gradients, masters and moments lie."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.exchange import AMAX_SLOTS
from moe_optim.kernels.launch_table import (
    AMAX_TILE,
    LaunchTable,
    Planned,
    owned_experts,
    owned_parts,
)
from moe_optim.kernels.member_table import Backend, MemberTable, has_kernels
from moe_optim.kernels.steps import staging
from moe_optim.kernels.steps.staging import Copies, Span, Stage
from moe_optim.kernels.tuning import ADAM_PART, STEP_TILES
from moe_optim.places import Places

_ALIGNMENT = 16  # bytes of the widest memory access
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdamState:
    """What a step reads and writes of one shard of a parameter, beside quantized buffers."""

    parameter: str
    """Name, for errors."""
    master: Tensor
    """[n] fp32."""
    gradient: Tensor
    """[n] fp32 or bf16, reduced."""
    exp_avg: Tensor
    """[n] fp32 or bf16: the first moment."""
    exp_avg_sq: Tensor
    """[n], the second moment, in the dtype of the first."""
    group: int = 0
    """Row of the hyper-parameters."""
    norm: int = 0
    """Which clip factor its gradient is multiplied by."""
    weight: Tensor | None = None
    """[n] fp32 or bf16 that the new masters are written to, or None."""
    on_host: tuple[Tensor, Tensor, Tensor] | None = None
    """Master and moments once more, as tensors of the CPU over the same memory, where they lie on
    the host."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that is read or written, not copies: [n] each, fp32 or bf16."""
        held = (self.master, self.gradient, self.exp_avg, self.exp_avg_sq)
        return held if self.weight is None else (*held, self.weight)

    def check(self) -> None:
        """Check that all there is has one size, one device and dtypes that kernels know.

        Raises:
            LayoutError: naming the parameter.
        """
        held = self.tensors()
        numels = {one.numel() for one in held}
        places = {one.device for one in held}
        known = self.master.dtype == torch.float32 and all(one.dtype in _DTYPES for one in held)
        same = self.exp_avg.dtype == self.exp_avg_sq.dtype
        # a shard of nothing has no memory
        flat = all(
            one.is_contiguous() and (one.untyped_storage().size() or not one.numel())
            for one in held
        )
        if len(numels) > 1 or len(places) > 1 or not (known and same and flat):
            spelt = ", ".join(f"{one.dtype} {list(one.shape)} on {one.device}" for one in held)
            raise LayoutError(
                f"{self.parameter}: expected an fp32 master, a gradient, two moments of one dtype "
                "and perhaps a weight, each fp32 or bf16, contiguous, of one size and on one "
                f"device, got {spelt}. Bring back what is offloaded, or set step: stock."
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RangeLaunch:
    """One launch over flat ranges that have everything in the same dtypes."""

    states: Tensor
    """[num_ranges, 6] int64: addresses of the first gradient and moments of a range, the row of its
    hyper-parameters, its clip factor, and the address of its weight or 0."""
    masters: Tensor
    """[num_ranges] int64: address of the first master."""
    parts: Tensor
    """[num_parts, 4] int64: range, first element, one past the last, and the slot of its amax."""
    gradient_dtype: torch.dtype
    moment_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    finds_amax: bool
    aligned: bool
    """Whether every range and every part starts at a multiple of 16 bytes, in all tensors."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemberLaunch:
    """One launch over whole blocks of quantized weights: what it steps, it encodes."""

    table: LaunchTable
    states: Tensor
    """[num_members, 6] int64 as in :class:`RangeLaunch`, of the first element of each expert."""
    gradient_dtype: torch.dtype
    moment_dtype: torch.dtype
    aligned: bool
    """Whether everything starts at multiples of 16 bytes, buffers included."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """States of the host that are on the device together, while they are stepped."""

    copies: Copies
    slot: int
    """Of the stage."""
    table: "StepTable"
    """Of the states where they are then, without further chunks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTable:
    """Everything that one rank updates of some parameters. Build it once with :meth:`build`.

    On a GPU it holds the addresses of its tensors.
    """

    states: tuple[AdamState, ...]
    """All that is updated."""
    members: MemberTable | None
    """What quantized masters are encoded into."""
    decoupled: bool
    """Whether weight decay is added to the update (AdamW), and not to the gradient."""
    hyper: Tensor
    """[num_groups, HYPER_FIELDS] fp32, which the caller fills before each step."""
    clips: Tensor
    """[num_norms] fp32 that gradients are multiplied by, likewise."""
    ranges: tuple[RangeLaunch, ...]
    """Launches over what is not encoded with its update."""
    encoding: tuple[MemberLaunch, ...]
    """Launches over whole blocks, which are."""
    encoded_last: tuple[LaunchTable, ...]
    """Launches that encode experts whose amax has to be known first, and is no other rank's."""
    remainder: tuple[AdamState, ...]
    """What no launch handles; all of it without a suitable GPU."""
    places: Places
    """Of masters, gradients, moments and weights."""
    chunks: tuple[Chunk, ...] = ()
    """What passes through the stage; the launches above are of everything else."""
    stage: Stage | None = None
    """Where chunks pass through, if there are any."""
    kernels: list[BoundKernel] = field(default_factory=list)
    """Filled by the first launch."""
    written: set[bool] = field(default_factory=set)
    """Not empty once a step has written masters, until the caller clears it."""

    @property
    def has_moved(self) -> bool:
        """Whether something lies elsewhere by now, so that the table has to be built anew."""
        return self.places.have_moved

    def watching(self, tensors: Iterable[Tensor]) -> "StepTable":
        """Return the same launches with a hold on ``tensors`` alone: who drops others frees them.

        It is the caller's then to know where the others are, since :attr:`has_moved` looks at these
        alone. What no launch handles is held all the same.

        Args:
            tensors: of any shapes and dtypes: some of the states', or views of the same memory.
        """
        return replace(self, states=(), places=Places(tensors), kernels=[])

    @classmethod
    def build(
        cls,
        states: Sequence[AdamState],
        hyper: Tensor,
        clips: Tensor,
        *,
        members: MemberTable | None = None,
        decoupled: bool = True,
        backend: Backend = "auto",
    ) -> "StepTable":
        """Check the states, and cut them into what launches handle.

        Args:
            states: of all that is owned, perhaps nothing.
            hyper: [num_groups, HYPER_FIELDS] fp32 on the device of the states, held and not
                copied: the caller fills it before each step.
            clips: [num_norms] fp32, likewise.
            members: a table whose sources are masters of some of the states. Blocks that no cut
                divides are encoded together with the update.
            decoupled: see the attribute.
            backend: ``auto`` takes kernels where they run, ``reference`` does without.

        Raises:
            LayoutError: states that do not fit each other.
        """
        for state in states:
            state.check()
        owned = [state for state in states if state.master.numel()]
        launched = {
            state.master.data_ptr(): state
            for state in owned
            if backend == "auto" and has_kernels(state.master.device)
        }
        remainder = [state for state in owned if state.master.data_ptr() not in launched]
        groups: list[tuple[LaunchTable | None, list[_Member]]] = []
        for launch in () if members is None else members.launches:
            quantized = [launched.pop(entry.source.data_ptr(), None) for entry, _ in launch.planned]
            if missing := [
                entry.parameter
                for (entry, _), state in zip(launch.planned, quantized, strict=True)
                if state is None
            ]:
                raise LayoutError(
                    f"{', '.join(missing)}: expected states whose masters are the sources of the "
                    "members, got none for these. Name every master, and take one backend for both."
                )
            of_launch = zip(_with_slots(launch), quantized, strict=True)
            groups.append((launch, [(planned, state) for planned, state in of_launch if state]))
        groups.append((None, [(None, state) for state in launched.values()]))
        common: dict[str, Any] = {
            "members": members,
            "decoupled": decoupled,
            "hyper": hyper,
            "clips": clips,
        }
        through = [
            _Staged(member, launch)
            for launch, of_launch in groups
            for member in of_launch
            if _passes_through(member[1])
        ]
        through += [
            _Staged((None, state), has_launch=False)
            for state in remainder
            if _passes_through(state)
        ]
        stage, chunks = _cut_chunks(through, common)
        here = [
            (launch, [member for member in of_launch if not _passes_through(member[1])])
            for launch, of_launch in groups
        ]
        return cls(
            **common,
            **_bind_launches(here, common),
            states=tuple(states),
            remainder=tuple(state for state in remainder if not _passes_through(state)),
            places=Places(tensor for state in owned for tensor in state.tensors()),
            chunks=chunks,
            stage=stage,
        )


_Member = tuple[Planned | None, AdamState]
"""A state, and of a quantized weight what it is encoded into, all slots of amaxes named."""


_Kind = tuple[torch.dtype, torch.dtype, torch.dtype | None, bool, bool]
"""Dtypes of gradient, moments and weight, whether an amax is found, whether all is aligned."""


class _Ranges:
    """Collects ranges by what one launch can handle."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, tuple[list[list[int]], list[int], list[list[int]]]] = {}

    def add_range(self, state: AdamState) -> None:
        """Add all of a shard."""
        self.add(state, 0, 0, state.master.numel())

    def add(self, state: AdamState, base: int, first: int, last: int, slot: int = -1) -> None:
        """Add elements ``first`` to ``last`` of what begins ``base`` elements before a shard does.

        Args:
            state: the shard.
            base: how far the element that others are counted from lies before the shard.
            first: counted from there, like ``last``.
            last: one past the last element.
            slot: the first of ``AMAX_SLOTS`` for the parts of the range; below zero without.
        """
        if last <= first:
            return
        finds_amax = slot >= 0
        row = _row(state, base)
        master = state.master.data_ptr() - base * state.master.element_size()
        weight = None if state.weight is None else state.weight.dtype
        aligned = not (master | row[0] | row[1] | row[2] | row[5]) % _ALIGNMENT and not first % 16
        kind = (state.gradient.dtype, state.exp_avg.dtype, weight, finds_amax, aligned)
        states, masters, parts = self._kinds.setdefault(kind, ([], [], []))
        length = ADAM_PART
        if finds_amax:  # the parts of a requantization, which leaves all other slots as they are
            length = -(-(last - first) // (AMAX_SLOTS * AMAX_TILE)) * AMAX_TILE
        for number, start in enumerate(range(first, last, length)):
            parts.append([len(states), start, min(last, start + length), slot + number])
        states.append(row)
        masters.append(master)

    def launches(self, device: torch.device) -> Iterator[RangeLaunch]:
        """Yield one launch a kind."""
        for kind, (states, masters, parts) in self._kinds.items():
            gradient, moments, weight, finds_amax, aligned = kind
            yield RangeLaunch(
                states=torch.tensor(states, dtype=torch.int64, device=device),
                masters=torch.tensor(masters, dtype=torch.int64, device=device),
                parts=torch.tensor(parts, dtype=torch.int64, device=device),
                gradient_dtype=gradient,
                moment_dtype=moments,
                weight_dtype=weight,
                finds_amax=finds_amax,
                aligned=aligned,
            )


def _row(state: AdamState, base: int) -> list[int]:
    """Return the row of a shard, counted from ``base`` elements before its first."""
    columns = [
        tensor.data_ptr() - base * tensor.element_size()
        for tensor in (state.gradient, state.exp_avg, state.exp_avg_sq)
    ]
    weight = state.weight
    place = 0 if weight is None else weight.data_ptr() - base * weight.element_size()
    return [*columns, state.group, state.norm, place]


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A state that passes through the stage."""

    member: _Member
    launch: LaunchTable | None = None
    """The launch of a requantization that it is of, if there is one."""
    has_launch: bool = True
    """Whether kernels step it."""


def _passes_through(state: AdamState) -> bool:
    return state.on_host is not None and state.master.numel() >= staging.SMALLEST


def _with_slots(launch: LaunchTable) -> Iterator[Planned]:
    """Yield the parameters of a launch with the slot of each expert, shared or not."""
    slots = iter(launch.amax_slots)
    for entry, exchange in launch.planned:
        yield entry, replace(exchange, experts={e: next(slots) for e in owned_experts(entry)})


def _cut_chunks(
    through: Sequence[_Staged], common: Mapping[str, Any]
) -> tuple[Stage | None, tuple[Chunk, ...]]:
    """Return the chunks that states pass through the device in, and the memory for it.

    Args:
        through: what passes.
        common: fields that the table of a chunk has from the whole.
    """
    if not through:
        return None, ()
    packed = staging.pack((_ends_of(one.member), _state_bytes(one.member[1])) for one in through)

    def needed(span: Span) -> list[tuple[int, torch.dtype]]:
        state = through[span.shard].member[1]
        numel = span.last - span.first
        return [(numel, one.dtype) for one in (state.master, state.exp_avg, state.exp_avg_sq)]

    needs = [[tensor for span in spans for tensor in needed(span)] for spans in packed]
    stage = Stage.of(common["hyper"].device, max(map(staging.slot_bytes, needs)))
    chunks = []
    for spans, tensors in zip(packed, needs, strict=True):
        slot = stage.next_slot()
        places = iter(staging.take_from(stage.slots[slot], tensors))
        copies: list[tuple[Tensor, Tensor]] = []
        groups: dict[LaunchTable | None, list[_Member]] = {}
        remainder: list[AdamState] = []
        for span in spans:
            one = through[span.shard]
            on_host, there = one.member[1].on_host, [next(places) for _ in range(3)]
            assert on_host is not None
            copies += [(h[span.first : span.last], d) for h, d in zip(on_host, there, strict=True)]
            member = _part_of(one.member, span, there)
            if one.has_launch:
                groups.setdefault(one.launch, []).append(member)
            else:
                remainder.append(member[1])
        table = StepTable(
            **common,
            **_bind_launches(list(groups.items()), common),
            states=(),
            remainder=tuple(remainder),
            places=Places(()),
        )
        chunks.append(Chunk(copies=copies, slot=slot, table=table))
    return stage, tuple(chunks)


def _part_of(member: _Member, span: Span, there: Sequence[Tensor]) -> _Member:
    """Return a part of a shard, its master and moments in other places."""
    planned, state = member
    here = slice(span.first, span.last)
    if planned is not None:
        entry, exchange = planned
        planned = replace(entry, source=there[0], start=entry.start + span.first), exchange
    part = replace(
        state,
        master=there[0],
        gradient=state.gradient[here],
        exp_avg=there[1],
        exp_avg_sq=there[2],
        weight=None if state.weight is None else state.weight[here],
        on_host=None,
    )
    return planned, part


def _state_bytes(state: AdamState) -> int:
    held = (state.master, state.exp_avg, state.exp_avg_sq)
    return sum(one.element_size() for one in held)


def _ends_of(member: _Member) -> list[int]:
    """Return where a shard may be cut, in its elements: at whole blocks, or experts; its end."""
    planned, state = member
    length = max(1, staging.CHUNK_BYTES // _state_bytes(state) // ADAM_PART) * ADAM_PART
    if planned is None:
        return [*range(length, state.master.numel(), length), state.master.numel()]
    entry, _ = planned
    format = entry.target.format
    block_row = format.block_row_height * entry.target.shape[2]
    length = max(1, length // block_row) * block_row
    ends: list[int] = []
    for part in owned_parts(entry):
        base = part.base - entry.start
        if not format.has_global_amax:
            first = (part.low // length + 1) * length
            ends += range(base + first, base + part.high, length)
        ends.append(base + part.high)
    return ends


def _bind_launches(
    groups: Sequence[tuple[LaunchTable | None, Sequence[_Member]]], common: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the launches over members, by field of a table.

    Args:
        groups: members, and the launch of a requantization that they are of, if there is one.
        common: fields that the table has besides.
    """
    ranges = _Ranges()
    encoding: list[MemberLaunch] = []
    encoded_last: list[LaunchTable] = []
    for launch, members in groups:
        if launch is None:
            for _, state in members:
                ranges.add_range(state)
            continue
        quantized = [(planned, state) for planned, state in members if planned is not None]
        encoding += _cut_members(launch, quantized, ranges)
        is_shared = common["members"].exchange.numel() > 0
        if launch.format.has_global_amax and quantized and not is_shared:
            planned = [planned for planned, _ in quantized]
            is_all = [entry for entry, _ in planned] == [entry for entry, _ in launch.planned]
            encoded_last.append(launch if is_all else LaunchTable.build(planned, launch.amax))
    return {
        "ranges": tuple(ranges.launches(common["hyper"].device)),
        "encoding": tuple(encoding),
        "encoded_last": tuple(encoded_last),
    }


def _cut_members(
    launch: LaunchTable, members: Sequence[tuple[Planned, AdamState]], ranges: _Ranges
) -> Iterator[MemberLaunch]:
    """Yield the launches over whole blocks, and add to ``ranges`` what they leave.

    Args:
        launch: of a requantization.
        members: parameters of its format, with masters as their sources, and their states.
        ranges: take what cuts divide, and experts whose amax has to be known first.
    """
    by_kind: dict[tuple[torch.dtype, torch.dtype], list[tuple[Planned, AdamState]]] = {}
    for planned, state in members:
        entry, exchange = planned
        for expert, part in zip(owned_experts(entry), owned_parts(entry), strict=True):
            base = entry.start - part.base
            if launch.format.has_global_amax:
                ranges.add(state, base, part.low, part.high, exchange.experts[expert])
                continue
            ranges.add(state, base, part.low, part.first_whole)
            ranges.add(state, base, part.end_whole, part.high)
        kind = (state.gradient.dtype, state.exp_avg.dtype)
        by_kind.setdefault(kind, []).append((planned, state))
    if launch.format.has_global_amax:
        return
    for (gradient, moments), of_kind in by_kind.items():
        table = LaunchTable.build(
            [planned for planned, _ in of_kind],
            launch.amax,
            tile=STEP_TILES[launch.format.name, moments],
        )
        rows = [
            _row(state, entry.start - part.base)
            for (entry, _), state in of_kind
            for part in owned_parts(entry)
        ]
        if not table.num_tiles:
            continue
        places = torch.tensor(rows, dtype=torch.int64, device="cpu")
        yield MemberLaunch(
            table=table,
            states=places.to(table.tiles.device),
            gradient_dtype=gradient,
            moment_dtype=moments,
            aligned=table.aligned and not bool((places[:, :3] % _ALIGNMENT).any()),
        )
