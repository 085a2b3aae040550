"""Last launch of a Muon step: decay, update and encoding of masters in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_optim.kernels.directed_state import DirectedState
from moe_optim.kernels.exchange import AMAX_SLOTS
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.plan import Backend, Plan
from moe_optim.kernels.update import Shard, Updates, match_members

Piece = tuple[int, int, int, Tensor]
"""Index of a state, first and end element in it, and their direction, [end - first] bf16, fp16 or
fp32, contiguous."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DirectedUpdates:
    """Steps of masters along directions that the caller computes, in any number of pieces.

    Build it once with :meth:`build`, then a plan of each set of pieces with :meth:`plan`. Launching
    plans that together cover every element once, in any order, and then :attr:`finish` completes
    the step. The caller fills hyper-parameters and clip factors first.
    """

    states: tuple[DirectedState, ...]
    """All states."""
    shards: tuple[Shard[DirectedState], ...]
    """States in the same order, with the member entries of those that kernels encode."""
    updates: Updates
    """Planner of the pieces."""
    finish: Plan
    """Encoding after all pieces of what kernels do not encode; empty if they encode everything."""
    written: set[bool] = field(default_factory=set)
    """Nonempty once a step has written masters, until the caller clears it."""

    @classmethod
    def build(
        cls,
        states: Sequence[DirectedState],
        hyper: Tensor,
        clips: Tensor,
        *,
        members: Sequence[MemberTable] = (),
        backend: Backend = "auto",
    ) -> "DirectedUpdates":
        """Check the states, and match them with the members that they are the masters of.

        ``hyper``, [num_groups, HYPER_FIELDS] fp32, and ``clips``, [num_norms] fp32, are stored by
        reference; for the columns of a direction see ``fields``. A negative factor skips the
        update, and encodes the unchanged masters again. The sources of ``members`` are masters of
        some of the states, without blocks or experts that ranks share. LayoutError for states with
        inconsistent tensors, or masters of members without a state.
        """
        for state in states:
            state.check()
        owned = [state for state in states if state.master.numel()]
        matched = {id(one.state): one for one in match_members(owned, members, backend)}
        shards, num_slots = _number_slots(
            [matched.get(id(state), Shard(state=state)) for state in states]
        )
        written: set[bool] = set()
        amax = torch.zeros(num_slots, dtype=torch.float32, device=hyper.device)
        updates = Updates(
            rule="direction",
            hyper=hyper,
            clips=clips,
            amax=amax if num_slots else None,
            written=written,
        )
        calls = [call for table in members for call in table.encode_unshared.calls]
        return cls(
            states=tuple(states),
            shards=tuple(shards),
            updates=updates,
            finish=Plan(device=hyper.device, calls=tuple(calls)),
            written=written,
        )

    def plan(self, pieces: Sequence[Piece]) -> Plan:
        """Return the update of some pieces, and on the kernel path their encoding.

        Elements outside of the pieces are neither read nor written. A piece of a member consists of
        whole block rows; for formats with a global amax, of whole experts.
        """
        shards = []
        for index, first, last, direction in pieces:
            shard = self.shards[index]
            shards.append(shard.piece(first, shard.state.piece(first, last, direction)))
        return self.updates.plan([shard for shard in shards if shard.state.master.numel()])


def _number_slots(
    shards: Sequence[Shard[DirectedState]],
) -> tuple[list[Shard[DirectedState]], int]:
    """Give every expert that needs an amax slots in one tensor; return the shards and its size."""
    numbered, num_slots = [], 0
    for shard in shards:
        member = shard.member
        if member is not None and member.launch.format.has_global_amax:
            experts = member.entry.owned_experts
            slots = range(num_slots, num_slots + AMAX_SLOTS * len(experts), AMAX_SLOTS)
            named = dict(zip(experts, slots, strict=True))
            exchange = replace(member.exchange, experts=named)
            shard = replace(shard, member=member._replace(exchange=exchange))
            num_slots += AMAX_SLOTS * len(experts)
        numbered.append(shard)
    return numbered, num_slots
