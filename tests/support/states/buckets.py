"""Managed buckets without a model, and stand-ins for those that weights are bound to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_optim.buckets.gather import OwnedMaster
from moe_optim.buckets.layout import Slot
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import Event, Gradients
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import VERSIONS, PortableStorage, Weights, WeightState

REACHED_BY = {  # what takes a bucket that shares memory into each state
    Gradients.ZERO: (),
    Gradients.PARTIAL: (Event.ACCUMULATE,),
    Gradients.REDUCED: (Event.REDUCE,),
    Gradients.SPENT: (Event.STEP, Event.SETTLE),
    Gradients.IN_FLIGHT: (Event.SETTLE, Event.GATHER),
}


def make_params(format: Any, slots: Sequence[Slot]) -> list[torch.nn.Parameter]:
    """Return quantized weights of the shapes of slots, not written yet."""
    return [
        torch.nn.Parameter(GroupedWeight(PortableStorage(format, slot.shape, name=slot.name)))
        for slot in slots
    ]


class Owner:
    """What steps the weights of a bucket, and counts how often something was found elsewhere."""

    def __init__(self, masters: Sequence[OwnedMaster]) -> None:
        self._masters, self._generation = list(masters), 1
        self.book = self

    def masters_of(self, _: ManagedBucket) -> list[OwnedMaster]:
        """Return all of them."""
        return list(self._masters)

    def check_bucket(self, bucket: ManagedBucket) -> int:
        """Return another number where something has moved."""
        self._generation += bucket.has_moved
        return self._generation


def make_bucket(
    params: Sequence[Any],
    slots: Sequence[Slot],
    grads: Tensor,
    *,
    dp_size: int = 1,
    wire: str = "quantized",
    masters: Sequence[OwnedMaster] = (),
    name: str = "bucket 0",
) -> ManagedBucket:
    """Return a bucket whose owner has ``masters``; its weights count as fresh."""
    starts = [slot.start for slot in slots]
    bucket = ManagedBucket(name, params, starts, grads, dp_size=dp_size, wire=wire)  # type: ignore[arg-type]
    bucket.owner = Owner(masters)
    return bucket


def own_masters(
    params: Sequence[Any], slots: Sequence[Slot], masters: Sequence[Tensor], rank: int, shard: int
) -> list[OwnedMaster]:
    """Return copies of what a rank owns of whole masters, where shards have ``shard`` elements."""
    owned = []
    for param, slot, master in zip(params, slots, masters, strict=True):
        place = slot.owned(rank, shard)
        if place:
            own = master.reshape(-1)[place.start : place.stop].clone()
            owned.append(OwnedMaster(param=param, start=place.start, master=own))
    return owned


@dataclass(eq=False)
class StandInBucket:
    """Stands in for the bucket that a weight is bound to; a test says what its weights are."""

    state: WeightState = field(default_factory=WeightState)
    version: int = -1
    gradients: int = 0
    """How many have been announced."""

    def is_now(self, weights: Weights) -> None:
        self.state.weights = weights

    def before_gradient(self) -> None:
        self.gradients += 1

    def note_initial(self) -> None:
        """Nothing drops initial values here."""

    def gather(self) -> None:
        """New bytes have arrived."""
        self.version = next(VERSIONS)


def bind(storage: Any, buffers: Mapping[str, Tensor] | None = None) -> StandInBucket:
    """Bind a storage to a bucket of its own, with memory for some buffers; return the bucket."""
    bucket = StandInBucket()
    storage.bind(buffers or {}, bucket=bucket)
    return bucket


def pointers(storage: Any) -> tuple[int, ...]:
    """Return the address of everything that products read."""
    tensors = (*storage.laid_out.buffers().values(), *storage.storage_scales.values())
    return tuple(tensor.data_ptr() for tensor in tensors)
