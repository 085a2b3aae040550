"""Bucket groups, which gather managed buckets whose weights are stale."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
)

from moe_optim.buckets.gather import fill_slices, start_gather
from moe_optim.buckets.managed_bucket import ManagedBucket, require_gradient_memory
from moe_optim.buckets.matrix_buffers import holds_matrices
from moe_optim.buckets.states import Event, Gradients, Weights
from moe_optim.errors import StateError
from moe_optim.integration.engine import original
from moe_optim.places import has_memory
from moe_optim.weights.te.fields import is_tensorwise

if TYPE_CHECKING:
    from moe_optim.weights.te.tensorwise import Transposes

_PARTITION = "megatron.core.distributed.distributed_data_parallel:partition_buckets"


class GroupedBucketGroup(_ParamAndGradBucketGroup):
    """Megatron's bucket group, with lazy gathers of managed buckets.

    The optimizer step marks managed buckets STALE or ENCODED. Every reader of weights (a forward
    pre-hook, an evaluation, a save, the end of a step) calls ``start_param_sync``, which encodes
    STALE buckets and gathers both kinds. FRESH weights are never gathered again.

    Groups without managed buckets behave as Megatron's, with two differences: a gather in flight
    always finishes with its post-processing, and tensorwise weights are transposed in one launch.

    Attributes:
        managed: managed buckets: all buckets of the group, or none.
    """

    def __init__(self, buckets: list[_ParamAndGradBucket], *args: Any, **kwargs: Any) -> None:
        self.managed = managed_buckets(buckets)
        self._dispatched = False
        self._transposes: Transposes | None = None
        super().__init__(buckets, *args, **kwargs)
        self.param_gather_handle: Any
        self.grad_reduce_handle: Any
        self.per_param_grad_ready_counts: dict[torch.nn.Parameter, int]
        for bucket in self.managed:
            size = self.intra_distributed_optimizer_instance_size  # distributed optimizers only
            if size != bucket.dp_size:
                raise StateError(
                    f"{bucket.name}: expected shards for the {bucket.dp_size} ranks its buffer was "
                    f"made for, got a group of {size}. Wrap the model with the groups it trains "
                    "with."
                )

    @property
    def param_gather_dispatched(self) -> bool:
        """Whether weights can be read without starting a gather."""
        if self.managed:
            behind = (Weights.STALE, Weights.ENCODED)
            return all(bucket.state.weights not in behind for bucket in self.managed)
        return self._dispatched

    @param_gather_dispatched.setter
    def param_gather_dispatched(self, dispatched: bool) -> None:
        self._dispatched = dispatched

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather stale weights; ``force_sync`` waits for them. Every rank must call it."""
        if self.param_gather_handle is not None and not force_sync:
            return  # a gather is in flight; no step can precede its end
        if self.managed:
            self.gather(force_sync=force_sync)
            return
        self.require_memory(Event.GATHER.value, gradients=False)
        super().start_param_sync(force_sync=force_sync)

    @torch.inference_mode(False)  # a rollout may plan buffers that training writes
    @torch.no_grad()
    def gather(self, *, force_sync: bool = False, unmoved: bool = False) -> None:
        """Gather stale managed weights. Every rank of the group must call it.

        A failed gather leaves the weights stale, and the next call gathers them again.
        ``force_sync`` waits for the weights; ``unmoved`` asserts that the last plan still holds.

        Raises:
            StateError: the memory holds gradients that no step has used, masters are moving, or
                weights to be gathered are offloaded.
        """
        if self.param_gather_handle is not None:
            self.finish_gather()
        current = (Weights.FRESH, Weights.OFFLOADED)
        behind = [bucket for bucket in self.managed if bucket.state.weights not in current]
        if not behind:
            return
        with self._stale_if_it_fails():
            group = self.intra_distributed_optimizer_instance_group
            for bucket in behind:
                bucket.open_gather(bucket.generation if unmoved else None)
            fill_slices([bucket.gather for bucket in behind], group)
            asynchronous = self.ddp_config.overlap_param_gather and not force_sync
            self.param_gather_handle = start_gather(
                [buffer for bucket in behind for buffer in bucket.gather.sliced],
                [buffer for bucket in behind for buffer in bucket.reduced],
                group,
                asynchronous=asynchronous,
            )
        if not asynchronous:
            self._post_param_sync()

    @contextmanager
    def _stale_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.param_gather_handle = None
            for bucket in self.managed:
                bucket.give_up_gather()
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def _post_param_sync(self) -> None:
        if self.managed:
            with self._stale_if_it_fails():
                for bucket in self.managed:
                    if bucket.state.weights is Weights.IN_FLIGHT:
                        bucket.finish()
        elif self._transposes is not None and not self._transposes.have_moved:
            self._transposes.renew()
        elif self._quantized:
            super()._post_param_sync()
            if all(map(is_tensorwise, self._quantized)):
                from moe_optim.weights.te.tensorwise import Transposes

                self._transposes = Transposes.of(self._quantized)

    @cached_property
    def _quantized(self) -> list[torch.nn.Parameter]:
        """Weights that Megatron post-processes after their gather."""
        holds_bytes = param_and_grad_buffer._param_uses_quantized_storage
        return [param for bucket in self.buckets for param in filter(holds_bytes, bucket.params)]

    def finish_gather(self) -> None:
        """Wait for a gather in flight and put its result in place; does nothing without one."""
        if self.param_gather_handle is None:
            return
        with self._stale_if_it_fails():
            self.param_gather_handle.wait()
        self.param_gather_handle = None
        self._post_param_sync()

    def gather_anew(self) -> None:
        """Make the next forward pass gather even fresh weights, for a CUDA graph to capture it.

        Every rank of the group must call it.
        """
        self.finish_gather()
        self._dispatched = False
        for bucket in self.managed:
            if bucket.state.weights in (Weights.FRESH, Weights.ENCODED):
                bucket.state.record(Event.SETTLE)

    def finish_communication(self) -> None:
        """Wait for all collectives on gradient memory, even after a failed backward pass."""
        if any(bucket.gather.uses_gradient_memory for bucket in self.managed):
            self.finish_gather()
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
            self.grad_reduce_handle = None
        # with several optimizer instances, reductions have a stream and no handle
        stream = getattr(self, "communication_stream", None)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def reset(self) -> None:
        """Prepare for the next iteration; a pass that missed some parameters is no first pass."""
        is_part = len(self.per_param_grad_ready_counts) < len(self.params)
        if is_part and self.ddp_config.overlap_grad_reduce and not self.grad_reduce_finished:
            self.per_param_grad_ready_counts = {}
        super().reset()

    def free_overlap_buffers(self) -> None:
        """Finish a gather in flight with its post-processing, which Megatron skips."""
        self.finish_gather()
        if not self.managed:
            super().free_overlap_buffers()

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Start to reduce the gradients, after finishing any gather in flight."""
        self.finish_gather()
        self.require_memory(Event.REDUCE.value, weights=False)
        already_dispatched = self.is_first_batch and self.grad_reduce_handle is not None
        if not already_dispatched:
            for bucket in self.managed:
                bucket.state.record(Event.REDUCE)
        super().start_grad_sync(force_all_reduce=force_all_reduce)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish the reduction, after finishing any gather in flight."""
        self.finish_gather()
        super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def read_gradients(self) -> None:
        """Record that the optimizer reads the gradients.

        They must be reduced. Unreduced gradients are accepted from a single rank without overlap or
        gradient scaling, for callers without Megatron's loop.
        """
        alone = (
            self.intra_distributed_optimizer_instance_size == 1
            and self.ddp_config.num_distributed_optimizer_instances == 1
            and not self.ddp_config.overlap_grad_reduce
        )
        for bucket, managed in zip(self.buckets, self.managed, strict=True):
            managed.find_unannounced(thoroughly=True)
            whole = alone and bucket.gradient_scaling_factor == 1
            if whole and managed.state.gradients is Gradients.PARTIAL:
                managed.state.record(Event.REDUCE)
            managed.state.record(Event.READ)

    def require_memory(self, what: str, *, gradients: bool = True, weights: bool = True) -> None:
        """Raise StateError if gradients or weights of Megatron's are offloaded before ``what``."""
        for bucket in self.buckets:
            if gradients:
                require_gradient_memory(f"bucket {bucket.bucket_id}", what, bucket.grad_data)
            if weights and bucket.param_data is not None and not has_memory(bucket.param_data):
                raise StateError(
                    f"bucket {bucket.bucket_id}: {what}: expected weights to write into, got none: "
                    "they are offloaded. Call reload_from_cpu() on the buffers of the DDP module "
                    "first."
                )

    def forget_masters(self) -> None:
        """Drop plans that hold addresses of masters."""
        self.finish_gather()
        for bucket in self.managed:
            bucket.forget_masters()


def bucket_groups(model_chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the bucket groups of DDP-wrapped chunks; in each chunk, those of experts come last."""
    for chunk in model_chunks:
        yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)


def gather_weights(chunk: Any) -> None:
    """Gather the stale weights of a chunk, if DDP wraps it.

    Every rank of the chunk's groups must call it, or none.
    """
    config = getattr(chunk, "ddp_config", None)
    if config is None or not config.use_distributed_optimizer:
        return
    for group in bucket_groups([chunk]):
        # Megatron's own groups gather in the step; shared memory may hold gradients
        is_behind = config.overlap_param_gather and _has_own_memory(group)
        if getattr(group, "managed", ()) or is_behind:
            group.start_param_sync(force_sync=True)


def _has_own_memory(group: Any) -> bool:
    return all(
        bucket.param_data is not None
        and bucket.param_data.untyped_storage().data_ptr()
        != bucket.grad_data.untyped_storage().data_ptr()
        for bucket in group.buckets
    )


def managed_buckets(buckets: Iterable[_ParamAndGradBucket]) -> tuple[ManagedBucket, ...]:
    """Return the managed buckets among Megatron's."""
    found = (getattr(bucket, "managed", None) for bucket in buckets)
    return tuple(managed for managed in found if managed is not None)


def partition_buckets(
    buffers: list[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
) -> list[_ParamAndGradBucketGroup]:
    """Partition the buckets of a model chunk into groups, each all managed or all unmanaged.

    Megatron adds all bf16 buckets to the group of the last quantized bucket, which delays their
    gather, and allows one buffer of quantized weights. Here every bucket communicates on its own,
    in the order of the backward pass. With ``force_single_bucket_group`` buckets form one group
    per optimizer and kind. Unmanaged buckets of a single optimizer are grouped by Megatron.
    """
    kinds = [(buffer.managed, holds_matrices(buffer.params)) for buffer in buffers]
    if len({is_muons for _, is_muons in kinds}) < 2 and not any(managed for managed, _ in kinds):
        groups = original(_PARTITION)(
            buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation
        )
    elif force_single_bucket_group:
        of_kind: dict[tuple[bool, bool], list[Any]] = {kind: [] for kind in sorted(kinds)}
        for kind, buffer in zip(kinds, buffers, strict=True):
            of_kind[kind] += [(buffer, bucket) for bucket in buffer.buckets]
        groups = [_make_group(placed) for placed in of_kind.values() if placed]
    else:
        placed = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        placed.sort(key=_last_registration, reverse=True)
        groups = [_make_group([one]) for one in placed]
    for buffer in buffers:
        mine = {id(bucket) for bucket in buffer.buckets}
        buffer.groups = [g for g in groups if any(id(bucket) in mine for bucket in g.buckets)]
    return groups


def partition_buckets_of_optimizer(*_: Any, **__: Any) -> list[_ParamAndGradBucketGroup]:
    """Return no bucket groups: the distributed optimizer makes its own, and does not use them."""
    return []


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
