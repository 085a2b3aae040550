"""A bucket of quantized weights: its state, its gradient memory, and how its weights are gathered.

It hangs on Megatron's bucket as ``bucket.managed``, and is the ``bucket`` of every weight in it.
"""

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import Any, Protocol

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor

from moe_optim.buckets.gather import (
    AmaxRecord,
    Bf16Gather,
    Gather,
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
from moe_optim.weights.storage import OFFLOADED, Watched, WeightStorage, new_version

_BUCKET, _HAVE_MOVED = attrgetter("bucket"), attrgetter("have_moved")


class Owner(Protocol):
    """The optimizer that steps the weights of a bucket."""

    def masters_of(self, bucket: "ManagedBucket") -> list[OwnedMaster]:
        """Return what this rank owns of the parameters of ``bucket``."""

    def find_generation(self, bucket: "ManagedBucket") -> int:
        """Return a number that is another one where masters or weights of ``bucket`` moved."""


class ManagedBucket:
    """Everything this package knows of one bucket; collectives are its bucket group's.

    Args:
        name: name of the bucket, for errors.
        params: quantized weights, in the order in which Megatron lists them.
        starts: first element of each in the bucket.
        grads: flat gradient memory, bf16 or fp32, padding included; the view is kept.
        dp_size: number of ranks that own an equal part of it each.
        wire: gather dtype.
        backend: who quantizes.

    Attributes:
        slots: places of the weights in the bucket.
        staging: flat bf16 view of the first bytes of ``grads``, one entry a gradient.
        state: contents of gradients and weights.
        gather: how the weights are gathered.
        owner: optimizer that was built last for them; None before there is one.
        generation: number of what the owner found when masters were last listed.
        version: version of the bytes of the last gather, see ``WeightStorage.version``.

    Raises:
        LayoutError: weights of several formats, or shards without whole bytes.
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
        self._writes = 0  # into watched gradients, when there last were none
        self.owner: Owner | None = None
        self._masters: list[OwnedMaster] | None = None
        self._plans = 0
        self.generation = 0
        self._planned_step: MemberTable | None = None
        self._planned_writes = 0  # into masters, when a step was planned
        self._master_writes = 0  # the same of the step that encoded them last
        self.version = new_version()
        self._has_initial = True  # some weights may have initial values
        self.state = BucketState(name, OWN_MEMORY if wire == "quantized" else SHARED_MEMORY)
        if not all(storage.is_fresh for storage in self.storages):
            self.state.record(Event.SETTLE)  # behind masters of another wrapper
        make_gather = QuantizedGather if wire == "quantized" else Bf16Gather
        self.gather: Gather = make_gather(
            name, self.params, self.slots, self.staging, dp_size=dp_size, backend=backend
        )
        for index, storage in enumerate(self.storages):
            storage.bind(self.gather.buffers_of(index), bucket=self)
        self._master_places, self._weight_places = self.places()
        self._amaxes = AmaxRecord.of(self.params)

    # What weights tell their bucket

    def before_gradient(self) -> None:
        """Note that a backward pass is about to add a gradient, which it may not live to tell.

        Called once a weight and micro-batch, before anything is written.
        """
        if not self._memory.nbytes():
            self.require_memory(Event.ACCUMULATE.value)
        gradients = self.state.gradients
        if gradients is Gradients.PARTIAL:
            return
        if gradients is not Gradients.ZERO and is_graph_capturing():
            return  # Megatron zeroes, or puts back, what a capture leaves in gradient memory
        self.state.record(Event.ACCUMULATE)

    def note_initial(self) -> None:
        """Note that a weight was given initial values, for the next gather to drop."""
        self._has_initial = True

    # Gradients

    def watch(self, gradients: Tensor, apart: Sequence[Tensor] = ()) -> None:
        """Count writes into gradient memory from here on.

        Args:
            gradients: alias of ``grads`` whose views share a version counter of their own: writes
                through ``grads`` itself, as those of this class are, do not count.
            apart: sums in fp32 of some gradients, which are copied in when they are reduced.
        """
        self._apart = tuple(apart)
        self._watched = Places([gradients, *apart])
        self._count_from_here()

    def zero(self) -> None:
        """Make all gradients zero, whatever is known of them; refuse while a gather uses them."""
        self.require_memory("zero_grad_buffer")
        self.state.record(Event.ZERO)
        for gradients in (self.grads, *self._apart):
            gradients.zero_()
        self._count_from_here()

    def find_unannounced(self, *, thoroughly: bool = False) -> None:
        """Note gradients that were written by hand, as nobody tells of these.

        Args:
            thoroughly: read the memory, which also finds what kernels wrote in a backward pass
                that ended in an exception. Waits for the device.
        """
        if self.state.gradients is not Gradients.ZERO:
            return
        if self._were_written() or (
            thoroughly and any(bool(gradients.any()) for gradients in (self.grads, *self._apart))
        ):
            self.state.record(Event.ACCUMULATE)

    def _were_written(self) -> bool:
        return self._watched.count_writes() != self._writes

    def _count_from_here(self) -> None:
        self._writes = self._watched.count_writes()

    def require_memory(self, what: str) -> None:
        """Raise StateError if the memory of gradients, which ``what`` uses, is offloaded."""
        require_gradient_memory(self.name, what, self.grads)

    # Plans

    def places(self) -> tuple[Places, tuple[Watched, ...]]:
        """Return what plans depend on: masters, and tensors that modules may exchange of weights.

        Masters get other memory where RL stacks offload them, by their ``data``; weights of
        Transformer Engine get other tensors from its modules.
        """
        watched = list(chain.from_iterable(storage.watched for storage in self.storages))
        fields = Attributes.merge(one for one in watched if isinstance(one, Attributes))
        others = (one for one in watched if not isinstance(one, Attributes))
        return Places(one.master for one in self._masters or ()), (*fields, *others)

    @property
    def has_moved(self) -> bool:
        """Whether masters or weights lie elsewhere than they were planned with."""
        return any(map(_HAVE_MOVED, (self._master_places, *self._weight_places)))

    def plan(self, generation: int) -> list[OwnedMaster]:
        """Return the masters of this rank; of another generation, everything is planned anew.

        Args:
            generation: number of what the owner finds now.
        """
        if generation != self.generation:
            for storage in self.storages:
                if storage.has_moved():
                    storage.take_over()
            self.forget_masters()
            self.generation = generation
        if self._masters is None:
            assert self.owner is not None  # who else has made the weights stale
            self._masters = self.owner.masters_of(self)
            self._master_places, self._weight_places = self.places()
        return self._masters

    def forget_masters(self) -> None:
        """Drop what was planned for masters, weights and memory that may lie elsewhere now."""
        self._masters = self._planned_step = None
        self._master_places, self._weight_places = self.places()
        self._has_initial = True  # as of weights that were given other tensors
        self._plans += 1
        self.gather.forget()
        if self._amaxes is not None:
            self._amaxes.forget()

    # Steps

    def plan_step(self, generation: int) -> MemberTable | None:
        """Return what a step encodes masters into, or None where only a gather reads them.

        No step may be taken while weights are on the host; what was planned is left alone then.

        Args:
            generation: number of what the owner finds now; another one than before plans anew.
        """
        if self.state.weights not in OFFLOADED:
            self.require_held()
            masters = self.plan(generation)
            self._planned_writes = self._count_master_writes()
            self._planned_step = self.gather.plan_step(masters)
        return self._planned_step

    def settle(self, *, encoded: bool) -> None:
        """Note that the masters have stepped, as :meth:`plan_step` has found them.

        Args:
            encoded: whether they have been encoded into what it returned.
        """
        self.state.record(Event.ENCODE if encoded else Event.SETTLE)
        if encoded:
            self._master_writes = self._planned_writes

    def _count_master_writes(self) -> int:
        return self._master_places.count_writes()

    # Gathers

    @property
    def reduced(self) -> list[Tensor]:
        """Buffers that a MAX all-reduce completes, once :meth:`open_gather` has been called."""
        amaxes = [] if self._amaxes is None else [self._amaxes.values]
        return [*self.gather.reduced, *amaxes]

    def open_gather(self, generation: int | None = None) -> None:
        """Begin to gather the weights: read the masters of this rank.

        Args:
            generation: the bucket's own, where nothing has run since :meth:`plan_step`; by default
                the owner compares, and masters that were written since are encoded anew.
        """
        if generation is None:
            self.require_held()
        if self.gather.uses_gradient_memory:
            self.require_memory(Event.GATHER.value)
            self.find_unannounced()
        encoded = self.state.weights is Weights.ENCODED
        self.state.record(Event.GATHER)
        if self.gather.uses_gradient_memory:
            self._count_from_here()
            self._rest.zero_()
        if generation is None:
            assert self.owner is not None  # who else has made the weights stale
            masters = self.plan(self.owner.find_generation(self))
            encoded = encoded and self._count_master_writes() == self._master_writes
        else:
            masters = self.plan(generation)
        self.gather.open(masters, encoded=encoded)
        if self._amaxes is not None:
            self._amaxes.fill(masters)

    def finish(self) -> None:
        """Put what has arrived in place: the weights are fresh."""
        if self.gather.uses_gradient_memory and self._were_written():
            raise StateError(
                f"{self.name}: {Event.FINISH.value}: expected memory that no gradient was written "
                "into, got gradients written by hand. Call start_param_sync(force_sync=True) on "
                "the DDP module before main_grad is written."
            )
        self.gather.finish()
        if self._amaxes is not None:
            self._amaxes.finish()
        self.state.record(Event.FINISH)
        self._count_from_here()
        self.version = new_version()
        if self._has_initial:
            self._has_initial = False
            for storage in self.storages:
                if storage.initial is not None:  # masters have been made of others
                    storage.initial = None

    def give_up_gather(self) -> None:
        """Leave the weights stale, and gradient memory free to be used, after a part failed."""
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
        """Number of the plan, and address of the gradients; captured graphs compare it."""
        return self._plans, self.grads.data_ptr()

    def require_replayable(
        self, begins_with: BucketContents, leaves: BucketContents, plan_number: tuple[int, int]
    ) -> None:
        """Raise StateError unless kernels that were captured between two states do the same now.

        They must neither read nor write other contents, nor memory that was given back.
        """
        self.state.require_replayable(begins_with, leaves)
        if self.plan_number != plan_number or self.has_moved:
            raise StateError(
                f"{self.name}: the replay of a CUDA graph: expected masters, weights and "
                "gradients where they lay when it was captured, got them elsewhere. Drop the graph "
                "(reset_cuda_graph()) and capture it again."
            )

    def replayed(self, begins_with: BucketContents, leaves: BucketContents) -> None:
        """Note what a replay has left, and that it may have brought other bytes."""
        self.state.replay(begins_with, leaves)
        if begins_with.weights is not leaves.weights:
            self.version = new_version()
        self._count_from_here()


def require_gradient_memory(where: str, what: str, gradients: Tensor) -> None:
    """Raise StateError if gradient memory is offloaded.

    Args:
        where: name of the bucket or buffer, for errors.
        what: use of the memory that follows, for errors.
        gradients: flat gradient memory; not read.
    """
    if not has_memory(gradients):
        raise StateError(
            f"{where}: {what}: expected gradient memory, got none: it is offloaded. Call "
            "restore_grad_buffers() first, or do this before offloading."
        )
