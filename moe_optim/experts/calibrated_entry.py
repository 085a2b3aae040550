"""Calibrated amaxes in checkpoints: saved where there are some, asked for where they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from torch import Tensor
from torch.nn import Module

from moe_optim.errors import LayoutError
from moe_optim.experts.calibrated_amax import calibrated_amax
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX
from moe_optim.experts.sharding import Offset


@dataclass(frozen=True, kw_only=True, slots=True)
class AmaxPlace:
    """Where the amaxes of the local experts of one linear lie among those of all ranks."""

    num_experts: int
    """Local ones."""
    place: Offset
    """Axis of the experts, place of the local ones on it, number of places."""
    sharded_offsets: tuple[Offset, ...]
    """Of the axes before that of the experts."""
    replicas: tuple[int, int, int]
    """Rank in expert-parallel, expert-tensor-parallel and expert-data-parallel groups."""

    def entry(self, key: str, amax: Tensor, *, per_expert: bool) -> ShardedTensor:
        """Return the entry of amaxes [E, 1, 1], under global expert ids, or of the one of all.

        Each expert's is saved by one of its replicas, that of all experts by one rank of all.
        """
        ep, tp, dp = self.replicas
        return ShardedTensor.from_rank_offsets(
            key,
            amax,
            *self.sharded_offsets,
            *((self.place,) if per_expert else ()),
            replica_id=(0 if per_expert else ep, tp, dp),
            prepend_axis_num=len(self.sharded_offsets),
        )

    def request(self, key: str, stored: Sequence[int], device: torch.device) -> ShardedTensor:
        """Return the entry that loads what a checkpoint has.

        Args:
            key: in the checkpoint.
            stored: shape of the tensor there.
            device: where the values go.

        Raises:
            LayoutError: it is of another number of experts.
        """
        axis, _, places = self.place
        of_experts, whole = tuple(stored[axis:]), places * self.num_experts
        per_expert = of_experts == (whole, 1, 1)
        if not per_expert and of_experts != (1, 1, 1):
            raise LayoutError(
                f"{key}: expected amaxes of {whole} experts, or one of all, got {list(stored)}. "
                "Load a checkpoint of as many experts."
            )
        shape = (self.num_experts if per_expert else 1, 1, 1)
        amax = torch.empty(shape, dtype=torch.float32, device=device)
        return self.entry(key, amax, per_expert=per_expert)


@dataclass(kw_only=True)
class CalibratedEntry(ShardedTensor):
    """The amaxes of a linear.

    A load does not know yet what the checkpoint has when keys are walked. This package's asks for
    what is stored, by :meth:`request`; and for nothing where nothing is.

    Attributes:
        amax_place: of the linear.
        device: of its weights.
    """

    amax_place: AmaxPlace
    device: torch.device

    def request(self, stored: Sequence[int]) -> ShardedTensor:
        """Return what asks for the amaxes that a checkpoint has under this key.

        Args:
            stored: their shape there.

        Raises:
            LayoutError: they are of another number of experts.
        """
        return self.amax_place.request(self.key, stored, self.device)


@dataclass(kw_only=True)
class _Uncalibrated(CalibratedEntry, LocalNonpersistentObject):
    """Nothing: it is not saved, and loads None.

    It is a tensor for whoever renames keys; Megatron takes what is not persistent out before it
    looks at tensors.
    """

    obj = None


def calibrated_entry(
    linear: Module,
    key: str,
    num_experts: int,
    place: Offset,
    sharded_offsets: tuple[Offset, ...],
    groups: Any,
) -> CalibratedEntry:
    """Return the entry of the calibrated amaxes of a linear. No rank communicates.

    Args:
        linear: of all local experts.
        key: of the linear in the checkpoint.
        num_experts: local ones.
        place: of the local experts among all.
        sharded_offsets: of the axes before that of the experts.
        groups: process groups; ``ep``, ``expt_tp`` and ``expt_dp`` are used.
    """
    where = AmaxPlace(
        num_experts=num_experts,
        place=place,
        sharded_offsets=sharded_offsets,
        replicas=(groups.ep.rank(), groups.expt_tp.rank(), groups.expt_dp.rank()),
    )

    amax = calibrated_amax(linear)
    if amax is None:
        values = torch.empty(num_experts, 1, 1, dtype=torch.float32, device="cpu")
    else:
        values = amax.clone()
    entry = where.entry(f"{key}.{CALIBRATED_AMAX}", values, per_expert=len(values) == num_experts)
    kind = CalibratedEntry if amax is not None else _Uncalibrated
    return kind(**vars(entry), amax_place=where, device=next(linear.parameters()).device)
