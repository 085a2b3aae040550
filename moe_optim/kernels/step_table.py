"""The update of a step: Adam over shards of any kind, and over blocks that are encoded with it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats.reference.adam import step_into
from moe_optim.kernels import staging
from moe_optim.kernels.cutting import int64
from moe_optim.kernels.launch_table import LaunchTable, Planned, amax_part_length
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.plan import ALIGNMENT, Backend, BoundKernel, Call, Plan, takes_kernels
from moe_optim.kernels.staging import Copies, Piece, Stage
from moe_optim.kernels.tuning import ADAM_PART, ADAM_TILE, STEP_TILES
from moe_optim.places import Places

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdamState:
    """Tensors of one shard of a parameter that a step reads and writes."""

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
    """Index of the clip factor."""
    weight: Tensor | None = None
    """[n] fp32 or bf16 that the new masters are written to, or None."""
    on_host: tuple[Tensor, Tensor, Tensor] | None = None
    """Master and moments once more, as tensors of the CPU over the same memory, where they lie on
    the host."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that is read or written, not copies: [n] each, fp32 or bf16."""
        held = (self.master, self.gradient, self.exp_avg, self.exp_avg_sq)
        return held if self.weight is None else (*held, self.weight)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in master and moments together."""
        held = (self.master, self.exp_avg, self.exp_avg_sq)
        return sum(one.element_size() for one in held)

    def check(self) -> None:
        """Check that all tensors have one size, one device and dtypes that kernels know.

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
class Chunk:
    """States of the host that are on the device together, while they are stepped."""

    copies: Copies
    slot: int
    """Slot of the stage."""
    update: Plan
    """Step of the states where they are then."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTable(Plan):
    """The step of some parameters of one rank. Build it once with :meth:`build`.

    A launch multiplies gradients by their clip factor, and overwrites masters, moments and weights;
    of quantized weights the buffers that travel of every block that is owned as a whole, and the
    maxima of the others, which ``members.encode_shared`` encodes once they are reduced. States of
    the host pass through the device in chunks, and are back when what follows on the current stream
    begins. The caller fills ``hyper`` and ``clips`` first, and zeroes buffers that ranks complete
    by a maximum.
    """

    states: tuple[AdamState, ...]
    """All states."""
    members: MemberTable | None
    """Destination of quantized masters."""
    hyper: Tensor
    """[num_groups, HYPER_FIELDS] fp32, which the caller fills before each step."""
    clips: Tensor
    """[num_norms] fp32, factors of the gradients, which the caller fills before each step."""
    update: Plan
    """Step of all states that do not pass through the stage."""
    remainder: tuple[AdamState, ...] = ()
    """States that plain torch steps; all of them without a suitable GPU."""
    chunks: tuple[Chunk, ...] = ()
    """States that pass through the stage."""
    stage: Stage | None = None
    """Memory that chunks pass through, if there are any."""
    written: set[bool] = field(default_factory=set)
    """Not empty once a step has written masters, until the caller clears it."""

    def watching(self, tensors: Iterable[Tensor]) -> "StepTable":
        """Return the same launches with a hold on ``tensors`` alone, so that others can be freed.

        :attr:`has_moved` compares these alone; the caller then knows where the others are. States
        that plain torch steps are held all the same.

        Args:
            tensors: tensors of the states, [n] fp32 or bf16, or views of the same memory.
        """
        return replace(self, states=(), places=Places(tensors))

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
        """Check the states, and plan their step.

        Args:
            states: all that is owned, perhaps nothing.
            hyper: [num_groups, HYPER_FIELDS] fp32 on the device of the states, held and not copied.
            clips: [num_norms] fp32, held and not copied. Below zero nothing moves.
            members: table whose sources are masters of some of the states. Blocks that no cut
                divides are encoded together with the update.
            decoupled: whether weight decay is added to the update (AdamW), and not to the gradient.
            backend: ``auto`` takes kernels where they run, ``reference`` does without.

        Raises:
            LayoutError: states that do not fit each other, or masters of members without a state.
        """
        for state in states:
            state.check()
        owned = [state for state in states if state.master.numel()]
        shards = list(_match(owned, members, backend))
        written: set[bool] = set()
        planner = _Planner(
            hyper=hyper, clips=clips, members=members, decoupled=decoupled, written=written
        )
        update = planner.update([shard for shard in shards if not shard.is_staged])
        stage, chunks = _cut_chunks([shard for shard in shards if shard.is_staged], planner)
        calls: list[Call] = []
        unshared = Plan(device=hyper.device, calls=())
        if members is not None:
            unshared = members.encode_unshared
            if members.exchange.numel():  # it holds the maxima of all ranks, of the last step
                calls.append(members.exchange.zero_)
        if stage is None:
            calls += [*update.calls, *unshared.calls]
        else:
            calls.append(partial(_step_in_chunks, stage, update, chunks, unshared))
        return cls(
            device=hyper.device,
            calls=tuple(calls),
            places=Places(tensor for state in owned for tensor in state.tensors()),
            states=tuple(states),
            members=members,
            hyper=hyper,
            clips=clips,
            update=update,
            remainder=tuple(shard.state for shard in shards if not shard.has_kernels),
            chunks=chunks,
            stage=stage,
            written=written,
        )


def _step_in_chunks(stage: Stage, update: Plan, chunks: Sequence[Chunk], unshared: Plan) -> None:
    with stage.opened():
        update.launch()
        for chunk in chunks:
            stage.run(chunk.copies, chunk.slot, chunk.update.launch)
        if unshared.calls:
            stage.wait_for_all()  # masters are read where they are at home
            unshared.launch()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shard:
    """A state, and of a quantized weight where it is encoded, all slots of amaxes named."""

    state: AdamState
    planned: Planned | None = None
    launch: LaunchTable | None = None
    """Launch of a requantization that the weight is part of."""
    has_kernels: bool = True

    @property
    def is_staged(self) -> bool:
        """Whether it passes through the stage, and does not stay where it is."""
        return self.state.on_host is not None and self.state.master.numel() >= staging.SMALLEST

    def ends(self) -> list[int]:
        """Return where it may be cut, in its elements: at whole blocks, or experts; its end."""
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

    def piece(self, first: int, last: int, there: Sequence[Tensor]) -> "_Shard":
        """Return elements ``first`` to ``last``, with master and moments in other places."""
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


def _match(
    owned: Sequence[AdamState], members: MemberTable | None, backend: Backend
) -> Iterator[_Shard]:
    """Yield states with the members whose sources are their masters: members first."""
    runs = {state.master.device: takes_kernels(backend, state.master.device) for state in owned}
    launched = {one.master.data_ptr(): one for one in owned if runs[one.master.device]}
    for launch in () if members is None else members.launches:
        slots = iter(launch.amax_slots)
        found = [launched.pop(entry.source.data_ptr(), None) for entry, _ in launch.planned]
        missing = []
        for (entry, exchange), state in zip(launch.planned, found, strict=True):
            named = {expert: next(slots) for expert in entry.owned_experts}
            planned = entry, replace(exchange, experts=named)
            if state is None:
                missing.append(entry.parameter)
            else:
                yield _Shard(state=state, planned=planned, launch=launch)
        if missing:
            raise LayoutError(
                f"{', '.join(missing)}: expected states whose masters are the sources of the "
                "members, got none for these. Name every master, and take one backend for both."
            )
    yield from (_Shard(state=state) for state in launched.values())
    for state in owned:
        if not runs[state.master.device]:
            yield _Shard(state=state, has_kernels=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Planner:
    """Plans updates that share hyper-parameters."""

    hyper: Tensor
    clips: Tensor
    members: MemberTable | None
    decoupled: bool
    written: set[bool]

    def update(self, shards: Sequence[_Shard]) -> Plan:
        """Plan the step of shards where they are, and the encoding that needs no other rank."""
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
        """Yield a launch a kind; with an amax, its parts are those of a requantization."""
        from moe_optim.kernels.adam_kernel import adam_kernel

        launches = () if self.members is None else self.members.launches
        amaxes = launches[0].amax if launches else self.hyper  # which nobody writes to then
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
        """Yield launches that step and encode whole blocks, and leave the others to ``ranges``."""
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
        """Leave experts to ``ranges``, which find their amax, and yield what encodes them then."""
        for (entry, exchange), state in group:
            for expert, part in zip(entry.owned_experts, entry.owned_parts(), strict=True):
                base = entry.start - part.base
                ranges.add(state, base, part.low, part.high, exchange.experts[expert])
        if self.members is None or self.members.exchange.numel():
            return  # other ranks have a share in some amaxes
        planned = [one for one, _ in group]
        is_all = [entry for entry, _ in planned] == [entry for entry, _ in launch.planned]
        table = launch if is_all else LaunchTable.build(planned, launch.amax)
        yield from table.bind_encoding()

    def _step(self, state: AdamState) -> None:
        step_into(  # version counters tell of writes by hand alone, as where kernels step
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
    """STATE_FIELDS a range, see ``fields``; addresses are those of its start."""
    masters: list[int] = field(default_factory=list)
    """Address of the first master of a range."""
    parts: list[list[int]] = field(default_factory=list)
    """Range, first element, one past the last, and the slot of the amax, for each part."""


class _Ranges:
    """Collects ranges by what one launch can handle."""

    def __init__(self) -> None:
        self.kinds: dict[_Kind, _RangeTable] = {}

    def add(self, state: AdamState, base: int, first: int, last: int, slot: int = -1) -> None:
        """Add elements ``first`` to ``last``, counted from ``base`` elements before a shard.

        Args:
            state: the shard.
            base: distance of the element that others are counted from, before the shard.
            first: first element.
            last: one past the last element.
            slot: first of ``AMAX_SLOTS`` for the parts of the range; below zero without.
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
        # with an amax the parts of a requantization, which leaves all other slots as they are
        length = amax_part_length(last - first) if kind.finds_amax else ADAM_PART
        for number, start in enumerate(range(first, last, length)):
            part = [len(table.states), start, min(last, start + length), slot + number]
            table.parts.append(part)
        table.states.append(row)
        table.masters.append(master)


def _row(state: AdamState, base: int) -> list[int]:
    """Return the row of a shard, counted from ``base`` elements before its first."""
    columns = [
        tensor.data_ptr() - base * tensor.element_size()
        for tensor in (state.gradient, state.exp_avg, state.exp_avg_sq)
    ]
    weight = state.weight
    place = 0 if weight is None else weight.data_ptr() - base * weight.element_size()
    return [*columns, state.group, state.norm, place]


def _cut_chunks(
    through: Sequence[_Shard], planner: _Planner
) -> tuple[Stage | None, tuple[Chunk, ...]]:
    """Return the chunks that shards pass through the device in, and the memory for it."""
    if not through:
        return None, ()
    packed = staging.pack((one.ends(), one.state.element_bytes) for one in through)

    def needed(piece: Piece) -> list[tuple[int, torch.dtype]]:
        state = through[piece.shard].state
        numel = piece.last - piece.first
        return [(numel, one.dtype) for one in (state.master, state.exp_avg, state.exp_avg_sq)]

    needs = [[tensor for piece in pieces for tensor in needed(piece)] for pieces in packed]
    stage = Stage.of(planner.hyper.device, max(map(staging.slot_bytes, needs)))
    chunks = []
    for pieces, tensors in zip(packed, needs, strict=True):
        slot = stage.next_slot()
        places = iter(staging.take_from(stage.slots[slot], tensors))
        copies: list[tuple[Tensor, Tensor]] = []
        shards = []
        for piece in pieces:
            shard, there = through[piece.shard], [next(places) for _ in range(3)]
            here: Any = shard.state.on_host
            copies += [
                (home[piece.first : piece.last], away)
                for home, away in zip(here, there, strict=True)
            ]
            shards.append(shard.piece(piece.first, piece.last, there))
        chunks.append(Chunk(copies=copies, slot=slot, update=planner.update(shards)))
    return stage, tuple(chunks)
