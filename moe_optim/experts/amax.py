"""The amax of every expert: recorded when bucket groups gather, kept in checkpoints."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from moe_optim.experts.linears import expert_linears
from moe_optim.weights.recorded_amax import RecordsAmax


@dataclass
class OptionalShardedTensor(ShardedTensor):
    """A tensor that a checkpoint may lack: then it is not asked for, and live values stay."""


def sharded_amax(
    linear: RecordsAmax,
    key: str,
    place: tuple[int, int, int],
    sharded_offsets: tuple[tuple[int, int, int], ...],
    groups: Any,
    *,
    num_experts: int | None = None,
) -> OptionalShardedTensor | None:
    """Return the amaxes of whole experts under their global ids; None where none are recorded.

    One entry [local experts, 1, 1] fp32 in either parameter layout, a copy. It holds NaN, which
    loading passes over, where tensor parallelism cuts experts and :func:`synchronize_amax` has not
    been called since the weights were written. No rank communicates.

    Args:
        linear: of all local experts.
        key: in the checkpoint.
        place: of the local experts among all: axis, place, number of places.
        sharded_offsets: of the axes before that of the experts.
        groups: process groups; ``expt_tp`` and ``expt_dp`` are used.
        num_experts: local ones, for which NaN is saved where none are recorded.
    """
    amax = linear.amax()
    if amax is None and num_experts is not None:
        amax = torch.full((num_experts,), torch.nan, dtype=torch.float32, device="cpu")
    if amax is None:
        return None
    if linear.whole_amax is not None:
        amax = linear.whole_amax
    elif groups.expt_tp.size() > 1:
        amax = torch.full_like(amax, torch.nan)
    return OptionalShardedTensor.from_rank_offsets(
        key,
        amax.clone().view(-1, 1, 1),
        *sharded_offsets,
        place,
        replica_id=(0, groups.expt_tp.rank(), groups.expt_dp.rank()),
        prepend_axis_num=len(sharded_offsets),
    )


def synchronize_amax(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Find the amaxes of experts that are cut over tensor-parallel ranks, before a save.

    Every rank must call it, then may walk the keys of its state dict without communication. It
    reduces with MAX over each layer's ``expt_tp`` group, and does nothing where experts are whole.

    Args:
        model_chunks: wrapped or not.
    """
    for chunk in model_chunks:
        for linear in expert_linears(chunk):
            recorder, expt_tp = linear.recorder, linear.groups.expt_tp
            amax = recorder.amax()
            if amax is not None and expt_tp.size() > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=expt_tp)
                if recorder.whole_amax is None:  # else loaded, from whoever had the masters
                    recorder.whole_amax = amax
