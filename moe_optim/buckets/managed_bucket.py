"""A bucket of quantized weights: its state, gradient memory, plans and gather.

It is ``bucket.managed`` of Megatron's bucket, and ``bucket`` of every weight storage in it.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor

from moe_optim.buckets.gather import (
    AmaxRecord,
    AnyGather,
    Bf16Gather,
    OwnedMaster,
    QuantizedGather,
    Wire,
)
from moe_optim.buckets.layout import Slot
from moe_optim.buckets.states import (
    OWN_MEMORY,
    SHARED_MEMORY,
    BucketContents,
    BucketState,
    Event,
    Gradients,
    Weights,
)
from moe_optim.errors import StateError
from moe_optim.kernels.member_table import Backend, MemberTable
from moe_optim.places import Attributes, Places, has_memory
from moe_optim.weights.storage import OFFLOADED, VERSIONS, Watched, WeightStorage

_BUCKET, _HAVE_MOVED = attrgetter("bucket"), attrgetter("have_moved")


class ManagedBucket:
    """State, plans and gather of one bucket; its bucket group runs the collectives.

    Args:
        params: quantized weights, in Megatron's order.
        starts: first element of each weight in the bucket.
        grads: flat gradient memory, bf16 or fp32, padding included; the view is kept.
        dp_size: number of equal shards.

    Attributes:
        slots: places of the weights in the bucket.
        shard_numel: elements of a shard.
        staging: flat bf16 view of the first bytes of ``grads``, one entry per gradient.
        owner: ``GroupedDistributedOptimizer`` last built for the weights; None before.
        generation: generation of the owner's masters and weights in the current plan.
        step_table: table that a step encodes masters with; None if only a gather reads them.
        reduced: buffers that a MAX all-reduce completes in a gather.
        version: version of the gathered bytes, see ``WeightStorage.version``.

    Raises:
        LayoutError: weights have several formats, or shards do not end at whole bytes.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[Any],
        starts: Sequence[int],
        grads: Tensor,
        *,
        dp_size: int,
        wire: Wire = "quantized",
        backend: Backend = "auto",
    ) -> None:
        self.name, self.dp_size, self.grads, self.wire = name, dp_size, grads, wire
        self.shard_numel = grads.numel() // dp_size
        self.params: tuple[torch.nn.Parameter, ...] = tuple(params)
        self.storages: tuple[WeightStorage, ...] = tuple(p.quantized_storage for p in params)
        self.slots = tuple(
            Slot(name=storage.name, start=start, shape=storage.shape)
            for storage, start in zip(self.storages, starts, strict=True)
        )
        self.staging = grads.view(torch.bfloat16)[: grads.numel()]
        self._memory = grads.untyped_storage()
        self._rest = grads.view(torch.uint8)[self.staging.nbytes :]
        self._watched = Places(())
        self._apart: tuple[Tensor, ...] = ()
        self._writes = 0  # into watched gradients, as of the last zero
        self.owner: Any = None
        self._masters: list[OwnedMaster] | None = None
        self._plans = 0
        self.generation = 0
        self.step_table: MemberTable | None = None
        self._planned_writes = 0  # into masters, as of the step's plan
        self._master_writes = 0  # into masters, as of the last encoding step
        self.version = next(VERSIONS)
        self._has_initial = True  # some weights may have initial values
        self.state = BucketState(name, OWN_MEMORY if wire == "quantized" else SHARED_MEMORY)
        if not all(storage.is_fresh for storage in self.storages):
            self.state.record(Event.SETTLE)  # behind the masters of another wrapper
        make_gather = QuantizedGather if wire == "quantized" else Bf16Gather
        self.gather: AnyGather = make_gather(self, backend)
        for index, storage in enumerate(self.storages):
            storage.bind(self.gather.buffers_of(index), bucket=self)
        self._record_places()
        self._amaxes = AmaxRecord.of(self.params)
        amaxes = () if self._amaxes is None else (self._amaxes.values,)
        self.reduced: tuple[Tensor, ...] = (*self.gather.reduced, *amaxes)

    # Notifications by weights

    def before_gradient(self) -> None:
        """Record that a backward pass is about to add a gradient.

        Called once per weight and micro-batch, before anything is written, in case the pass fails.
        """
        if not self._memory.nbytes():
            require_gradient_memory(self.name, Event.ACCUMULATE.value, self.grads)
        gradients = self.state.gradients
        if gradients is Gradients.PARTIAL:
            return
        if gradients is not Gradients.ZERO and is_graph_capturing():
            return  # Megatron resets gradient memory after a capture
        self.state.record(Event.ACCUMULATE)

    def note_initial(self) -> None:
        """Record that a weight has initial values, for the next gather to drop."""
        self._has_initial = True

    # Gradients

    def watch(self, gradients: Tensor, apart: Sequence[Tensor] = ()) -> None:
        """Count writes into gradient memory from now on.

        ``gradients`` is an alias of ``grads`` with a separate version counter, so that writes
        through ``grads`` do not count; ``apart`` are fp32 accumulators copied in when they are
        reduced.
        """
        self._apart = tuple(apart)
        self._watched = Places([gradients, *apart])
        self._writes = self._watched.count_writes()

    def zero(self) -> None:
        """Zero all gradients in any state; refuse while a gather uses their memory."""
        require_gradient_memory(self.name, "zero_grad_buffer", self.grads)
        self.state.record(Event.ZERO)
        for gradients in (self.grads, *self._apart):
            gradients.zero_()
        self._writes = self._watched.count_writes()

    def find_unannounced(self, *, thoroughly: bool = False) -> None:
        """Detect gradients that were written without :meth:`before_gradient`.

        ``thoroughly`` reads the memory, which also detects writes of kernels in a failed backward
        pass, and synchronizes with the device.
        """
        if self.state.gradients is not Gradients.ZERO:
            return
        were_written = self._watched.count_writes() != self._writes
        if were_written or (
            thoroughly and any(bool(gradients.any()) for gradients in (self.grads, *self._apart))
        ):
            self.state.record(Event.ACCUMULATE)

    # Plans

    def _record_places(self) -> None:
        """Record what plans depend on: masters, and weight tensors that modules may replace.

        RL stacks that offload masters replace their ``data``; modules of Transformer Engine replace
        weight tensors.
        """
        watched = [one for storage in self.storages for one in storage.watched]
        fields = Attributes.merge([one for one in watched if isinstance(one, Attributes)])
        others = [one for one in watched if not isinstance(one, Attributes)]
        self._master_places = Places([one.master for one in self._masters or ()])
        self._weight_places: tuple[Watched, ...] = (*fields, *others)

    @property
    def has_moved(self) -> bool:
        """Whether masters or weights have moved since they were planned."""
        return any(map(_HAVE_MOVED, (self._master_places, *self._weight_places)))

    def plan(self, generation: int) -> list[OwnedMaster]:
        """Return the masters of this rank; a new ``generation`` of the owner rebuilds all plans."""
        if generation != self.generation:
            for storage in self.storages:
                if storage.has_moved():
                    storage.take_over()
            self.forget_masters()
            self.generation = generation
        if self._masters is None:
            self._masters = list[OwnedMaster](self.owner.masters_of(self))
            self._record_places()
        return self._masters

    def forget_masters(self) -> None:
        """Drop plans, since masters, weights or gradient memory may have moved."""
        self._masters = self.step_table = None
        self._record_places()
        self._has_initial = True  # weights may have been replaced
        self._plans += 1
        self.gather.forget()
        if self._amaxes is not None:
            self._amaxes.forget()

    # Steps

    def plan_step(self, generation: int) -> MemberTable | None:
        """Return the table that a step encodes masters with; None if only a gather reads them.

        A new ``generation`` of the owner rebuilds the plan. While weights are on the host no step
        can run, and the previous plan is returned.
        """
        if self.state.weights not in OFFLOADED:
            self.require_held()
            masters = self.plan(generation)
            self._planned_writes = self._master_places.count_writes()
            self.step_table = self.gather.plan_step(masters)
        return self.step_table

    def settle(self, *, encoded: bool) -> None:
        """Record that the masters have stepped, and whether the planned table has encoded them."""
        self.state.record(Event.ENCODE if encoded else Event.SETTLE)
        if encoded:
            self._master_writes = self._planned_writes

    # Gathers

    def open_gather(self, generation: int | None = None) -> None:
        """Begin a gather: read the masters of this rank.

        Pass the bucket's own ``generation`` if nothing has run since :meth:`plan_step`; by default
        the owner checks it, and masters written since are encoded again.
        """
        if generation is None:
            self.require_held()
        if self.gather.uses_gradient_memory:
            require_gradient_memory(self.name, Event.GATHER.value, self.grads)
            self.find_unannounced()
        encoded = self.state.weights is Weights.ENCODED
        self.state.record(Event.GATHER)
        if self.gather.uses_gradient_memory:
            self._writes = self._watched.count_writes()
            self._rest.zero_()
        if generation is None:
            masters = self.plan(self.owner.book.check_bucket(self))
            encoded = encoded and self._master_places.count_writes() == self._master_writes
        else:
            masters = self.plan(generation)
        self.gather.open(masters, encoded=encoded)
        if self._amaxes is not None:
            self._amaxes.fill(masters)

    def finish(self) -> None:
        """Put the received data in place and mark the weights FRESH."""
        if self.gather.uses_gradient_memory and self._watched.count_writes() != self._writes:
            raise StateError(
                f"{self.name}: {Event.FINISH.value}: expected memory that no gradient was written "
                "into, got gradients written directly. Call start_param_sync(force_sync=True) on "
                "the DDP module before main_grad is written."
            )
        self.gather.finish()
        if self._amaxes is not None:
            self._amaxes.finish()
        self.state.record(Event.FINISH)
        self._writes = self._watched.count_writes()
        self.version = next(VERSIONS)
        if self._has_initial:
            self._has_initial = False
            for storage in self.storages:
                if storage.initial is not None:  # masters are newer
                    storage.initial = None

    def give_up_gather(self) -> None:
        """Mark the weights STALE and release gradient memory, after a failed gather."""
        if self.state.weights is Weights.IN_FLIGHT:
            self.state.record(Event.FAIL)

    def require_held(self) -> None:
        """Raise StateError if another bucket has bound the weights since."""
        if not any(map(is_not, map(_BUCKET, self.storages), repeat(self))):
            return
        names = ", ".join(storage.name for storage in self.storages if storage.bucket is not self)
        raise StateError(
            f"{self.name}: expected {names} in this bucket, got them in one of a "
            "DistributedDataParallel that was made later for the same model. Use that one, and an "
            "optimizer that was built for it, and drop the others."
        )

    # Replays of CUDA graphs

    @property
    def plan_number(self) -> tuple[int, int]:
        """Generation of the plan plus the gradient address; captured graphs compare it."""
        return self._plans, self.grads.data_ptr()

    def require_replayable(
        self, begins_with: BucketContents, leaves: BucketContents, plan_number: tuple[int, int]
    ) -> None:
        """Raise StateError unless a replay would access the captured contents and addresses."""
        self.state.require_replayable(begins_with, leaves)
        if self.plan_number != plan_number or self.has_moved:
            raise StateError(
                f"{self.name}: the replay of a CUDA graph: expected masters, weights and "
                "gradients where they lay when it was captured, got them elsewhere. Drop the graph "
                "(reset_cuda_graph()) and capture it again."
            )

    def replayed(self, begins_with: BucketContents, leaves: BucketContents) -> None:
        """Record the contents that a replay leaves, and a new version if it gathered."""
        self.state.replay(begins_with, leaves)
        if begins_with.weights is not leaves.weights:
            self.version = next(VERSIONS)
        self._writes = self._watched.count_writes()


def require_gradient_memory(where: str, what: str, gradients: Tensor) -> None:
    """Raise StateError if gradient memory is offloaded before ``what`` uses it."""
    if not has_memory(gradients):
        raise StateError(
            f"{where}: {what}: expected gradient memory, got none: it is offloaded. Call "
            "restore_grad_buffers() first, or do this before offloading."
        )
