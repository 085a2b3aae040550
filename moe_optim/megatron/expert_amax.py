"""The amax of every expert: recorded when bucket groups gather, kept in checkpoints."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from moe_optim.kernels.table_entry import TableEntry
from moe_optim.megatron.gather import OwnedMaster
from moe_optim.modules.amax_search import AmaxSearch
from moe_optim.modules.grouped_linear import GroupedLinear
from moe_optim.modules.storage import PlaneStorage


class AmaxRecord:
    """The amaxes of all experts of a bucket group, which travel with its gather as one vector.

    Formats with a global amax have theirs without it; see :meth:`of`.

    Args:
        params: weights that record, in the same order on every rank of the group.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = tuple(params)
        sizes = [storage.shape[0] for storage in self._storages()]
        device = self._storages()[0].device
        self._values = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._parts = self._values.split(sizes)
        self._search: AmaxSearch | None = None

    @classmethod
    def of(cls, params: Sequence[torch.nn.Parameter]) -> "AmaxRecord | None":
        """Return a record of those weights that want one, or None if none does.

        Args:
            params: quantized weights, in the same order on every rank.
        """
        recording = [param for param in params if _storage(param).recorded_amax is not None]
        return cls(recording) if recording else None

    def fill(self, masters: Callable[[], Sequence[OwnedMaster]]) -> Tensor:
        """Return this rank's share, [experts] fp32, which a MAX over all ranks completes in place.

        Args:
            masters: lists those of this rank; they are the same tensors until :meth:`forget`.
        """
        if self._search is None:
            self._search = AmaxSearch(self._entries(masters()))
        self._search.find_into(self._values)
        return self._values

    def land(self) -> None:
        """Hand the completed maxima to the weights, whose bytes are now those of the masters."""
        recorded = [_storage(param).recorded_amax for param in self._params]
        torch._foreach_copy_([amax for amax in recorded if amax is not None], self._parts)

    def forget(self) -> None:
        """Drop what was planned for masters that may lie elsewhere from now on."""
        self._search = None

    def _entries(self, masters: Sequence[OwnedMaster]) -> list[TableEntry]:
        owned = {id(one.param): one for one in masters}
        entries = []
        for param, storage in zip(self._params, self._storages(), strict=True):
            one = owned.get(id(param))
            entries.append(
                TableEntry(
                    parameter=storage.name,
                    source=self._values.new_empty(0) if one is None else one.master,
                    target=storage.quantized,
                    start=0 if one is None else one.start,
                )
            )
        return entries

    def _storages(self) -> list[PlaneStorage]:
        return [_storage(param) for param in self._params]


def _storage(param: Any) -> PlaneStorage:
    storage: PlaneStorage = param.quantized_storage
    return storage


@dataclass
class OptionalShardedTensor(ShardedTensor):
    """A tensor that a checkpoint may lack: then it is not asked for, and live values stay."""


def sharded_amax(
    linear: GroupedLinear,
    key: str,
    place: tuple[int, int, int],
    sharded_offsets: tuple[tuple[int, int, int], ...],
    groups: Any,
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
    """
    amax = linear.amax()
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
    modules = [module for chunk in model_chunks for module in chunk.modules()]
    for experts in modules:
        linears = [child for child in experts.children() if isinstance(child, GroupedLinear)]
        for linear in linears:
            group: Any = experts.pg_collection.expt_tp  # type: ignore[union-attr]
            amax = linear.amax()
            if amax is not None and group.size() > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
                if linear.whole_amax is None:  # else loaded, from whoever had the masters
                    linear.whole_amax = amax
