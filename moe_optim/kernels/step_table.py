"""Optimizer step: Adam over shards of any kind, fused with encoding of whole blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_optim.kernels import staging
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.plan import Backend, Call, Plan
from moe_optim.kernels.staging import Copies, Stage, StagedRange
from moe_optim.kernels.tuning import RANGE_PART
from moe_optim.kernels.update import MatchedState, Updates
from moe_optim.places import Places


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """Offloaded states that are on the device together while they are stepped."""

    copies: Copies
    slot: int
    update: Plan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTable(Plan):
    """Optimizer step of some parameters of one rank. Build it once with :meth:`build`.

    A launch multiplies gradients by their clip factor and updates masters, moments and weights. For
    quantized weights it writes the gathered buffers of entirely owned blocks, and the maxima of the
    others, which ``members.encode_shared`` encodes once the maxima are reduced. Offloaded states
    pass through the device in chunks; later work on the current stream sees them updated. The
    caller fills ``hyper`` and ``clips`` first, and zeroes buffers that ranks combine by MAX.
    """

    states: tuple[AdamState, ...]
    """All states."""
    members: MemberTable | None
    """Destination of quantized masters."""
    hyper: Tensor
    """Hyper-parameters, [num_groups, HYPER_FIELDS] fp32, filled by the caller before each step."""
    clips: Tensor
    """Clip factors of the gradients, [num_norms] fp32, filled by the caller before each step."""
    update: Plan
    """Step of all states that are not staged."""
    remainder: tuple[AdamState, ...] = ()
    """States that plain torch steps; all of them without a supported GPU."""
    chunks: tuple[Chunk, ...] = ()
    """Staged states."""
    stage: Stage | None = None
    """Memory that chunks pass through, or None."""
    written: set[bool] = field(default_factory=set)
    """Nonempty once a step has written masters, until the caller clears it."""

    def watching(self, tensors: Iterable[Tensor]) -> "StepTable":
        """Return the same launches with references to ``tensors`` only; others can then be freed.

        :attr:`has_moved` compares only these tensors; the caller tracks the others. States that
        plain torch steps stay referenced.

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
            states: all owned states; may be empty.
            hyper: [num_groups, HYPER_FIELDS] fp32 on the device of the states, stored by reference.
            clips: [num_norms] fp32, stored by reference. A negative factor skips the update.
            members: table whose sources are masters of some of the states. Blocks that no cut
                divides are encoded in the same kernel as the update.
            decoupled: whether to add weight decay to the update (AdamW) rather than to the
                gradient.
            backend: ``auto`` for kernels where supported, ``reference`` for plain torch.

        Raises:
            LayoutError: states with inconsistent tensors, or masters of members without a state.
        """
        updates = Updates.build(
            states,
            hyper,
            clips,
            rule="adamw" if decoupled else "adam",
            members=() if members is None else [members],
            backend=backend,
        )
        staged = [one for one in updates.shards if _is_staged(one.state)]
        update = updates.plan([one for one in updates.shards if not _is_staged(one.state)])
        stage, chunks = _cut_chunks(staged, updates)
        calls: list[Call] = []
        if members is not None and members.exchange.numel():
            calls.append(members.exchange.zero_)  # still holds the reduced maxima of the last step
        if stage is None:
            calls += [*update.calls, *updates.finish.calls]
        else:
            calls.append(partial(_step_in_chunks, stage, update, chunks, updates.finish))
        return cls(
            device=hyper.device,
            calls=tuple(calls),
            places=Places(tensor for state in states for tensor in state.tensors()),
            states=tuple(states),
            members=members,
            hyper=hyper,
            clips=clips,
            update=update,
            remainder=tuple(one.state for one in updates.shards if not one.has_kernels),
            chunks=chunks,
            stage=stage,
            written=updates.written,
        )


def _step_in_chunks(stage: Stage, update: Plan, chunks: Sequence[Chunk], finish: Plan) -> None:
    with stage.opened():
        update.launch()
        for chunk in chunks:
            stage.run(chunk.copies, chunk.slot, chunk.update.launch)
        if finish.calls:
            stage.wait_for_all()  # encoding reads masters on the host
            finish.launch()


def _is_staged(state: AdamState) -> bool:
    """Return whether a state is copied to the device for its step."""
    return state.on_host is not None and state.master.numel() >= staging.SMALLEST


def _ends_of(shard: MatchedState[AdamState]) -> list[int]:
    """Return the elements at which chunks may end, at whole blocks or experts, and its end."""
    numel = shard.state.master.numel()
    length = staging.CHUNK_BYTES // shard.state.element_bytes
    length = max(1, length // RANGE_PART) * RANGE_PART
    if shard.member is None:
        return [*range(length, numel, length), numel]
    entry = shard.member.entry
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


def _cut_chunks(
    through: Sequence[MatchedState[AdamState]], updates: Updates[AdamState]
) -> tuple[Stage | None, tuple[Chunk, ...]]:
    """Return the stage and the chunks of staged shards."""
    if not through:
        return None, ()
    packed = staging.pack((_ends_of(one), one.state.element_bytes) for one in through)

    def needed(piece: StagedRange) -> list[tuple[int, torch.dtype]]:
        state = through[piece.shard].state
        numel = piece.last - piece.first
        return [(numel, one.dtype) for one in (state.master, state.exp_avg, state.exp_avg_sq)]

    needs = [[tensor for piece in pieces for tensor in needed(piece)] for pieces in packed]
    stage = Stage.of(updates.hyper.device, max(map(staging.slot_bytes, needs)))
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
            state = shard.state.piece(piece.first, piece.last, there)
            shards.append(shard.piece(piece.first, state))
        chunks.append(Chunk(copies=copies, slot=slot, update=updates.plan(shards)))
    return stage, tuple(chunks)
