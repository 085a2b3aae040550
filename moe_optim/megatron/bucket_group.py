"""Bucket groups: the one owner of what managed buckets hold and of how fresh their weights are."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
)
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.megatron.bucket_storage import Content, Event
from moe_optim.megatron.expert_amax import AmaxRecord
from moe_optim.megatron.gather import OwnedMaster, fill_slices, start_gather

_stock_partition_buckets = upstream.partition_buckets


class Weights(Enum):
    """Whether the weights of a group are those of the current masters."""

    FRESH = "fresh"
    STALE = "stale"


class Owner(Protocol):
    """An optimizer that holds masters of a group's parameters."""

    buffers: list[_ParamAndGradBuffer]
    """All whose parameters it steps."""

    def masters_of(self, bucket: _ParamAndGradBucket) -> list[OwnedMaster]:
        """Return what this rank owns of the parameters of ``bucket``."""


class GroupedBucketGroup(_ParamAndGradBucketGroup):
    """Megatron's bucket group, where a group of managed buckets gathers by its own rules.

    Nobody pushes masters into the memory of a managed bucket. An optimizer marks the group stale;
    whoever next needs the weights (a forward pre-hook, an evaluation, a save, the end of a step)
    calls ``start_param_sync``, and the group then pulls the masters, quantizes and gathers, in the
    order that the wire demands. Fresh weights are never gathered again. Groups without managed
    buckets behave as Megatron's, except that a gather in flight is always finished with its
    post-processing.
    """

    def __init__(self, buckets: list[_ParamAndGradBucket], *args: Any, **kwargs: Any) -> None:
        """Arguments are Megatron's. Buckets must be all managed or all not."""
        super().__init__(buckets, *args, **kwargs)
        self.managed = all(hasattr(bucket, "storage") for bucket in buckets)
        self.param_gather_handle: Any
        self.weights = Weights.FRESH
        self._owners: list[Owner] = []
        self._stepped: list[Owner] = []
        self._in_flight = False
        self._amax_record: AmaxRecord | None = None
        self._places: tuple[tuple[Tensor, int], ...] | None = None  # masters and their addresses

    def bind(self) -> None:
        """Become the owner of the buckets. The optimizer's duplicate groups never call this."""
        for bucket in self.buckets if self.managed else ():
            self._check_size(bucket)
            bucket.finish_gather = self.finish_gather
            if bucket.gather.uses_gradient_memory:
                bucket.storage.before_zero = self.finish_gather
        if self.managed:
            params = [param for bucket in self.buckets for param in bucket.params_list]
            self._amax_record = AmaxRecord.of(params)

    def add_owner(self, owner: Owner) -> None:
        """Name an optimizer whose masters the group gathers; it counts itself in with a step.

        It takes the place of one that was built before for the same buffers.
        """
        self.forget_masters()
        others = [one for one in self._owners if not set(one.buffers) & set(owner.buffers)]
        self._stepped = [one for one in self._stepped if one in others]
        self._owners = [*others, owner]

    def mark_stale(self, owner: Owner) -> None:
        """Note that the masters of ``owner`` have moved on; nothing is gathered yet.

        Raises:
            StateError: another optimizer has taken its place.
        """
        if owner not in self._owners:
            raise StateError(
                f"{self._name()}: expected a step of the optimizer that was built last for this "
                "model, got one of an earlier one, whose masters are no longer gathered. Step the "
                "last one, and drop the others."
            )
        self._set_weights(Weights.STALE)
        self.param_gather_dispatched = False
        if owner not in self._stepped:
            self._stepped.append(owner)

    def _set_weights(self, weights: Weights) -> None:
        self.weights = weights
        for param in self.params:
            param.quantized_storage.is_fresh = weights is Weights.FRESH

    @torch.inference_mode(False)  # a rollout may gather first, and training writes what it plans
    @torch.no_grad()
    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather the weights if they are stale. Every rank of the group must call it.

        Args:
            force_sync: return only when the weights are in place, whatever the configuration.

        Raises:
            StateError: the memory holds gradients that no step has used; or not all optimizers of
                the group have stepped and the weights are wanted at once.
        """
        if self.param_gather_handle is not None and not force_sync:
            return  # one is on its way; no step comes before its end
        if not self.managed:
            super().start_param_sync(force_sync=force_sync)
            return
        self.finish_gather()
        if self.weights is Weights.STALE and not self.all_owners_stepped():
            if force_sync:
                raise StateError(
                    f"{self._name()}: expected all {len(self._owners)} optimizers of the group to "
                    f"have stepped, got {len(self._stepped)}. Finish optimizer.step() before "
                    "weights are read."
                )
            return  # the last owner's step comes here again
        if self.weights is Weights.STALE:
            self._forget_moved_masters()
            gathers = [bucket.gather for bucket in self.buckets]
            group = self.intra_distributed_optimizer_instance_group
            for bucket in self.buckets:
                bucket.gather.open(partial(self._masters_of, bucket))
            fill_slices(gathers, group)
            maxima = []
            if self._amax_record is not None:
                maxima.append(self._amax_record.fill(self._masters))
            asynchronous = self.ddp_config.overlap_param_gather and not force_sync
            self.param_gather_handle = start_gather(
                gathers, group, asynchronous=asynchronous, maxima=maxima
            )
            self._in_flight = True
            if not asynchronous:
                self._post_param_sync()
        self.param_gather_dispatched = True

    def all_owners_stepped(self) -> bool:
        """Return whether every optimizer of the group has counted itself in."""
        return len(self._stepped) == len(self._owners)

    def _masters_of(self, bucket: _ParamAndGradBucket) -> list[OwnedMaster]:
        return [one for owner in self._owners for one in owner.masters_of(bucket)]

    def _masters(self) -> list[OwnedMaster]:
        return [one for bucket in self.buckets for one in self._masters_of(bucket)]

    def _forget_moved_masters(self) -> None:
        """Plan anew where masters got other memory, as RL stacks offload: by their ``data``."""
        if any(master.data_ptr() != address for master, address in self._places or ()):
            self.forget_masters()
        if self._places is None:
            self._places = tuple((one.master, one.master.data_ptr()) for one in self._masters())

    @torch.inference_mode(False)
    @torch.no_grad()
    def _post_param_sync(self) -> None:
        """Put what a gather brought in place, one launch a bucket."""
        if not self.managed:
            super()._post_param_sync()
            return
        if not self._in_flight:
            return  # Megatron calls this after every start, also when nothing was gathered
        self._in_flight = False
        for bucket in self.buckets:
            bucket.gather.land()
        if self._amax_record is not None:
            self._amax_record.land()
        for param in self.params:
            param.quantized_storage.finish_gather()
        self._stepped = []
        self._set_weights(Weights.FRESH)

    def finish_gather(self) -> None:
        """Wait for a gather in flight and put its result in place; do nothing without one."""
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._post_param_sync()

    def free_overlap_buffers(self) -> None:
        """Finish a gather in flight, its post-processing included (Megatron drops that)."""
        self.finish_gather()
        if not self.managed:
            super().free_overlap_buffers()

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce the gradients, after a gather that no forward pass waited for has finished."""
        self.finish_gather()
        already_dispatched = self.is_first_batch and self.grad_reduce_handle is not None
        if self.managed and not already_dispatched:
            for bucket in self.buckets:
                bucket.storage.record(Event.REDUCE)
        super().start_grad_sync(force_all_reduce=force_all_reduce)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish the reduction; a gather that no forward pass waited for is finished first."""
        self.finish_gather()
        super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def read_gradients(self) -> None:
        """Let the optimizer read the gradients.

        They must have been reduced, unless one rank has them all and nothing scales them: callers
        without Megatron's loop need not reduce them then. With overlap the last backward pass does,
        so that gradients it has not reduced are not all there.

        Raises:
            StateError: they have not.
        """
        alone = (
            self.intra_distributed_optimizer_instance_size == 1
            and self.ddp_config.num_distributed_optimizer_instances == 1
            and not self.ddp_config.overlap_grad_reduce
        )
        for bucket in self.buckets:
            storage = bucket.storage
            if alone and bucket.gradient_scaling_factor == 1 and storage.content is Content.PARTIAL:
                storage.record(Event.REDUCE)
            storage.record(Event.READ)

    def record(self, event: Event) -> None:
        """Record an event on every bucket of a managed group."""
        for bucket in self.buckets:
            bucket.storage.record(event)

    def forget_masters(self) -> None:
        """Drop what was planned for masters that may lie elsewhere from now on."""
        self.finish_gather()
        self._places = None
        for bucket in self.buckets:
            bucket.gather.forget()
        if self._amax_record is not None:
            self._amax_record.forget()

    def _check_size(self, bucket: _ParamAndGradBucket) -> None:
        size = self.intra_distributed_optimizer_instance_size
        planned = bucket.gather.dp_size
        if size != planned:
            raise StateError(
                f"{bucket.storage.name}: expected shards for the {planned} ranks its buffer was "
                f"made for, got a group of {size}. Wrap the model with the groups it trains with."
            )

    def _name(self) -> str:
        return self.buckets[0].storage.name


def partition_buckets(
    buffers: list[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
) -> list[_ParamAndGradBucketGroup]:
    """Cut the buckets of a model chunk into groups; managed and other buckets never share one.

    Megatron puts all bf16 buckets into the group of the last quantized bucket, where their gather
    waits for everything. Here every bucket communicates on its own, and groups follow each other in
    the order of the backward pass. With ``force_single_bucket_group`` there is one group of
    managed buckets and one of the others.
    """
    if not any(buffer.managed for buffer in buffers):
        return _stock_partition_buckets(
            buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation
        )
    if force_single_bucket_group:
        groups = [
            _make_group([(buffer, bucket) for buffer in kind for bucket in buffer.buckets])
            for kind in _split(buffers, lambda buffer: buffer.managed)
        ]
    else:
        placed = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        placed.sort(key=_last_registration, reverse=True)
        groups = [_make_group([one]) for one in placed]
    for group in groups:
        group.bind()
    return groups


def _split(
    buffers: list[_ParamAndGradBuffer], predicate: Callable[[_ParamAndGradBuffer], bool]
) -> list[list[_ParamAndGradBuffer]]:
    halves = [[b for b in buffers if not predicate(b)], [b for b in buffers if predicate(b)]]
    return [half for half in halves if half]


def _last_registration(placed: tuple[_ParamAndGradBuffer, _ParamAndGradBucket]) -> int:
    """Return the highest registration index in a bucket, counted over buffers of one dtype."""
    buffer, bucket = placed
    index = dict(zip(buffer.params, buffer.param_indices, strict=True))
    return max(index[param] for param in bucket.params_list)


def _make_group(
    placed: list[tuple[_ParamAndGradBuffer, _ParamAndGradBucket]],
) -> GroupedBucketGroup:
    buffer = placed[0][0]
    return GroupedBucketGroup(
        [bucket for _, bucket in placed],
        buffer.ddp_config,
        buffer.data_parallel_group,
        buffer.data_parallel_world_size,
    )
