"""The distributed optimizer of quantized expert weights."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups, managed_buckets
from moe_optim.buckets.gather import OwnedMaster
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import Event, Weights
from moe_optim.checkpoint.model_values import model_values_for
from moe_optim.checkpoint.param_groups import with_groups_of_adam, with_rates_of
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.optimizer.address_book import Page
from moe_optim.optimizer.chained import check_masters
from moe_optim.optimizer.checkpointed import CheckpointedOptimizer
from moe_optim.optimizer.description import describe
from moe_optim.optimizer.fused import FusedUpdate
from moe_optim.optimizer.host_states import HostStates
from moe_optim.optimizer.initial_values import keep_loaded_values, renew_initial_values
from moe_optim.optimizer.owned import flat_masters, flat_params, owned_masters, weight_of
from moe_optim.optimizer.step_hooks import (
    OwnStep,
    has_hooks,
    hooked,
    require_shown,
    showing_gradients,
)
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.managed import is_managed, is_tensorwise, storage_of


class GroupedDistributedOptimizer(CheckpointedOptimizer):
    """Megatron's distributed optimizer, whose bucket groups gather quantized weights.

    Parameters without a quantized storage take Megatron's code unchanged. For those that have one,
    a step ends with their bucket groups stale, or encoded where it was fused; see
    :class:`GroupedBucketGroup`.
    """

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Shard the masters; arguments are Megatron's.

        ``reuse_grad_buf_for_mxfp8_param_ag`` tells Megatron's step to leave weights to the training
        loop, which stages them later. Here every step takes care of all of them.

        Raises:
            ConfigError: ``--optimizer-cpu-offload`` has come to Megatron's factory, not to ours.
        """
        if config.optimizer_cpu_offload:  # which would step beside our masters, or in their place
            raise ConfigError(
                "--optimizer-cpu-offload: expected moe_optim.get_megatron_optimizer to build the "
                "optimizer, got Megatron's function. Call ours in its place, with its arguments."
            )
        if config.reuse_grad_buf_for_mxfp8_param_ag:
            config = copy.copy(config)
            config.reuse_grad_buf_for_mxfp8_param_ag = False
        super().__init__(optimizer, config, *args, **kwargs)
        self._groups: list[GroupedBucketGroup] = []
        self._managed_groups: list[GroupedBucketGroup] = []
        self._buckets: tuple[ManagedBucket, ...] = ()
        self._owned = Page()
        self._unmanaged: tuple[int, list[tuple[torch.nn.Parameter, Tensor]]] = (0, [])
        self._own_step = OwnStep(optimizer)
        self._is_planned = False  # since gradients were read
        self._is_hooked = False  # whether hooks ran in the last update, which may be gone by now
        self.host_states = HostStates([], 0.0)
        self.has_tensorwise = False
        if self.is_stub_optimizer or self.ddp_config.use_megatron_fsdp:
            return
        self._buckets = managed_buckets(b for buffer in self.buffers for b in buffer.buckets)
        # weights with one scale: of all ranks that share the buffers alike, whoever owns a part
        self.has_tensorwise = any(map(is_tensorwise, self._parameters()))
        self._groups = self._find_groups()
        self._managed_groups = [group for group in self._groups if group.managed]
        if self.knobs.offload_states:  # masters that Adam holds are none of Megatron's
            masters = [m for group in self.shard_fp32_from_float16_groups for m in group]
            self.host_states = HostStates(
                [master for master in masters if master is not None], self.knobs.offload_states
            )
        for bucket in self._buckets:
            self._check_shards(bucket)
            bucket.owner = self  # in place of an optimizer that was built before
        for group in self._managed_groups:
            group.forget_masters()
        # Megatron drops these only where this rank owns a part of the parameter, and never of a
        # frozen one; those of other optimizers are still wanted
        mine = {param for bucket in self._buckets for param in bucket.params}
        for param in (param for chunk in self.model_chunks for param in chunk.parameters()):
            if param in mine or (not param.requires_grad and is_managed(param)):
                param.quantized_storage.initial = None
        keep_loaded_values(self.model_chunks)

    def __repr__(self) -> str:
        """Return the class, and what it manages on this rank."""
        return f"{type(self).__name__}({describe(self.model_chunks, self).line})"

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield those that the ranks which share this optimizer's buffers own together."""
        return (param for buffer in self.buffers for param in buffer.params)

    def _all_groups(self) -> list[Any]:
        """Return the bucket groups of these parameters, of whichever class."""
        mine = {id(bucket) for buffer in self.buffers for bucket in buffer.buckets}
        groups = bucket_groups(self.model_chunks)
        return [group for group in groups if any(id(bucket) in mine for bucket in group.buckets)]

    def _find_groups(self) -> list[GroupedBucketGroup]:
        return [group for group in self._all_groups() if isinstance(group, GroupedBucketGroup)]

    @property
    def managed_buckets(self) -> tuple[ManagedBucket, ...]:
        """The buckets of quantized weights whose masters this optimizer steps."""
        return self._buckets

    def finish_gathers(self) -> None:
        """Finish gathers that are in flight: they read what is written next."""
        for group in self._groups:
            group.finish_gather()

    def masters_of(self, bucket: ManagedBucket) -> list[OwnedMaster]:
        """Return the masters of what this rank owns in ``bucket``, not copies."""
        params = set(bucket.params)
        return [
            OwnedMaster(
                param=param,
                start=self._get_model_param_range_map(param)["param"].start,
                master=master,
            )
            for param, master in owned_masters(self)
            if param in params
        ]

    def _check_shards(self, bucket: ManagedBucket) -> None:
        """Raise LayoutError unless Megatron's shards and our own plan of them agree."""
        rank, shard_numel = self.data_parallel_group.rank(), bucket.grads.numel() // bucket.dp_size
        planned = sum(len(slot.owned(rank, shard_numel)) for slot in bucket.slots)
        held = sum(one.master.numel() for one in self.masters_of(bucket))
        if held != planned:
            raise LayoutError(
                f"{bucket.name}: expected masters of {planned} elements on data-parallel rank "
                f"{rank} of {bucket.dp_size}, got {held}. Megatron lays shards out differently "
                "from what moe_optim was built for; run `moe-optim doctor`."
            )

    @classmethod
    def _build_model_and_main_param_groups(
        cls,
        gbuf_ranges: list[dict[Any, Any]],
        param_gbuf_map: dict[torch.nn.Parameter, Any],
        opt_group_ranges: list[Any],
        config: Any,
    ) -> Any:
        """Allocate the masters; quantized bytes are never sliced as if they were elements."""
        if any(is_managed(param) for param in param_gbuf_map):
            renew_initial_values(param_gbuf_map)
            config = copy.copy(config)
            config.fp8_recipe = None  # "delayed", Megatron's default, would slice them
        return super()._build_model_and_main_param_groups(
            gbuf_ranges, param_gbuf_map, opt_group_ranges, config
        )

    @classmethod
    def _is_fp8_param_for_param_gather(cls, tensor: Tensor) -> bool:
        """Return whether Megatron quantizes ``tensor``: nothing that is managed."""
        return not is_managed(tensor) and super()._is_fp8_param_for_param_gather(tensor)

    @staticmethod
    def _is_grouped_quantized_tensor(tensor: Tensor) -> bool:
        """Return whether Megatron must not touch the bytes of ``tensor``."""
        return isinstance(
            tensor, GroupedWeight
        ) or DistributedOptimizer._is_grouped_quantized_tensor(tensor)

    def _copy_model_grads_to_main_grads(self) -> None:
        """Take this rank's gradients, which must have been reduced.

        Raises:
            StateError: weight gradients of some experts are still delayed.
        """
        self.read_gradients()
        super()._copy_model_grads_to_main_grads()

    def read_gradients(self) -> None:
        """Check that this rank's gradients are there, and say that they are read.

        Raises:
            StateError: they were not reduced, their memory or weights that a step writes are
                offloaded, or weight gradients of some experts are delayed.
        """
        self._is_planned = False
        for linear in self._delaying_linears:
            linear.require_wgrads_taken()
        for group in self._groups:
            group.require_gradients("optimizer.step()")
            group.require_weights("optimizer.step()")
        for group in self._managed_groups:
            group.read_gradients()

    @cached_property
    def _delaying_linears(self) -> tuple[GroupedLinear, ...]:
        modules = (module for chunk in self.model_chunks for module in chunk.modules())
        linears = (module for module in modules if isinstance(module, GroupedLinear))
        return tuple(linear for linear in linears if linear.delay_wgrad)

    def step_with_ready_grads(self) -> bool:
        """Step, having said of all quantized weights that they are behind before a master moves.

        What ends a step in the middle, such as an interrupt, then leaves weights that are known to
        be behind, and gradients that no second step can use.

        Raises:
            StateError: gradients were not reduced, weights are offloaded, or another optimizer was
                built for the model since.
        """
        self.finish_gathers()  # they read what is written now
        with self._moving_masters():
            return super().step_with_ready_grads()

    @contextmanager
    def _moving_masters(self) -> Iterator[None]:
        """Say of quantized weights that they are behind, before a master moves in a block."""
        try:
            self._record(Event.STEP)
            yield
        finally:
            for bucket in self._buckets:
                if bucket.state.weights is Weights.MOVING:
                    bucket.state.record(Event.SETTLE)  # masters stay where they have come to

    @cached_property
    def update(self) -> FusedUpdate:
        """What a fused step does with this optimizer's masters."""
        return FusedUpdate(self)

    def plan_update(self) -> int:
        """Look whether anything has changed that an update depends on, and plan anew what has.

        It follows the norm. It takes the host a while where there are many weights, and waits for
        no device.

        Returns:
            As :meth:`FusedUpdate.plan`, and it raises what that raises.

        Raises:
            StateError: something else is called in the place of Adam's ``step``, or a loss scale
                has been set.
        """
        self._own_step.require(self.optimizer)
        if self.grad_scaler is not None:
            raise StateError(
                "optimizer step: expected no loss scale, as when the optimizer was built, got a "
                f"{type(self.grad_scaler).__name__}. Set step: stock."
            )
        self.finish_gathers()
        plans = self.update.plan()
        self._is_planned = True
        return plans

    def update_masters(self, clips: Tensor) -> None:
        """Step masters and write what is made of them on this rank, in a few launches.

        Step hooks of Adam are called around it, which find clipped gradients in ``grad``.
        :meth:`plan_update` has gone before, unless such a hook is to.

        Args:
            clips: what gradients are multiplied by, see :meth:`FusedUpdate.launch`.

        Raises:
            StateError: as :meth:`step_with_ready_grads`; or a hook has done what a fused step does
                not see.
        """
        with self.updating():
            if has_hooks(self.optimizer):
                self._update_hooked(clips)
            else:
                if not self._is_planned:  # a hook that was waited for is gone
                    self.plan_update()
                self.update.step(clips)
            self._cast_tensorwise()

    def _update_hooked(self, clips: Tensor) -> None:
        """Step masters between the hooks of Adam, which may move or write what they like."""
        with showing_gradients(self, clips) as remaining, self.hooks():
            if remaining is not clips:
                require_shown(self)
            self.plan_update()
            self.update.step(remaining)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Call the step hooks of Adam around a block; weights follow what they write of masters."""
        self._is_hooked = has_hooks(self.optimizer)
        with hooked(self.optimizer):
            yield
        if self._is_hooked:
            self._copy_unmanaged_params()

    def _cast_tensorwise(self) -> None:
        if self.has_tensorwise and not self.update.cast_tensorwise():
            super()._copy_main_params_to_model_params()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Say of all quantized weights what a block does to them, in which masters are updated.

        It follows :meth:`read_gradients`. What ends the block in the middle leaves weights that are
        known to be behind, and gradients that no second step can use.

        Raises:
            StateError: as :meth:`step_with_ready_grads`.
        """
        self.finish_gathers()
        self._is_hooked = False
        try:
            with self._moving_masters():
                yield
                # hooks may have written masters in a way that no version counter tells of
                encoded = () if self._is_hooked else self.update.encoded
                for bucket in self._buckets:
                    bucket.settle(encoded=bucket in encoded)
        finally:
            for group in self._groups:  # some weights may have been written, whatever came after
                group.param_gather_dispatched = False

    def gather_unless_overlapped(self) -> None:
        """Gather what a step has left, unless forward passes do. Every rank must call it.

        It follows :meth:`plan_update` in a step, with nothing between them that moves anything.
        """
        if self.ddp_config.overlap_param_gather:
            return
        try:
            for bucket in self._buckets:  # hooks have run since
                bucket.is_looked_at = not self._is_hooked
            self.start_param_sync_for_bucket_group_subset()
        finally:
            for bucket in self._buckets:
                bucket.is_looked_at = False

    def _record(self, event: Event) -> None:
        for bucket in self._buckets:
            if bucket.owner is not self:
                raise StateError(
                    f"{bucket.name}: expected a step of the optimizer that was built last for this "
                    "model, got one of an earlier one, whose masters are no longer gathered. Step "
                    "the last one, and drop the others."
                )
        for bucket in self._buckets:
            bucket.state.record(event)

    def _copy_main_params_to_model_params(self) -> None:
        """Write bf16 and fp32 weights of this rank; quantized ones become stale instead."""
        self.finish_gathers()
        if self._buckets:
            self._copy_unmanaged_params()
        else:
            super()._copy_main_params_to_model_params()
        for group in self._groups:
            group.param_gather_dispatched = False  # whatever was gathered since the last reduction
        self._record(Event.SETTLE)

    def _copy_unmanaged_params(self) -> None:
        """Write what Megatron's method would write, without looking at every expert on the way."""
        generation = self._owned.compare([*flat_params(self), *flat_masters(self)], [])
        if generation != self._unmanaged[0]:
            pairs = [pair for pair in owned_masters(self) if not is_managed(pair[0])]
            self._unmanaged = generation, pairs
        weights, masters = [], []
        for param, master in self._unmanaged[1]:
            weight = weight_of(self, param, master)
            if weight is not None:
                weights.append(weight)
                masters.append(master.detach())
        if weights:
            torch._foreach_copy_(weights, masters)

    def start_param_sync_for_bucket_group_subset(self) -> None:
        """Start the gathers of this optimizer's own groups. Every rank must call it.

        Megatron starts those of all groups of a chunk, once for each optimizer that has stepped.
        """
        if not self._groups:  # a model that was wrapped before install()
            super().start_param_sync_for_bucket_group_subset()
        self._start_gathers(self._groups, force_sync=False)

    def _start_gathers(self, groups: Sequence[Any], *, force_sync: bool) -> None:
        """Gather as the model chunks do: where nothing overlaps, with what follows a gather."""
        for chunk in self.model_chunks:
            for group in bucket_groups([chunk]):
                if group in groups:
                    chunk._start_bucket_group_param_sync(group, force_sync=force_sync)

    def _copy_main_params_to_param_buffer(self) -> None:
        """Do nothing: managed buckets pull masters when they gather, others hold them already."""

    def prepare_model_params_for_param_sync(self) -> None:
        """Do nothing: managed buckets pull masters when they gather, others hold them already."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those included that a backward pass has delayed."""
        super().zero_grad(set_to_none)
        for linear in self._delaying_linears:
            linear.drop_delayed_wgrads()

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Make masters of the weights, then the weights of the masters. Every rank must call it.

        Args:
            state_dict: of the model, to take instead of the weights it holds, with the experts in
                any layout; see :func:`model_values_for`. Left alone.

        Raises:
            LayoutError: a parameter is not in it, or twice, or in another shape.
        """
        super()._copy_model_params_to_main_params(state_dict=state_dict)
        if state_dict is None:
            self._take_loaded_values()
        self.refresh_weights()

    def _take_loaded_values(self) -> None:
        """Make masters of the values that weights were loaded with, before these were quantized."""
        for one in (one for bucket in self._buckets for one in self.masters_of(bucket)):
            loaded = storage_of(one.param).initial
            if loaded is not None:
                values = loaded.reshape(-1)[one.start : one.start + one.master.numel()]
                one.master.copy_(values)

    def _build_model_param_to_state_dict_param_map(
        self, state_dict: dict[str, Any]
    ) -> dict[torch.nn.Parameter, Tensor]:
        """Return the values of every parameter, found by its whole name and not by its end."""
        return model_values_for(self.model_chunks, state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters and moments, and derive quantized weights from the masters.

        Megatron loads weights and masters apart, and requantizes what it dequantized for saving;
        about one block in twenty then has another scale than before. Every rank must call it.
        """
        if self.host_states.numel:
            self.update.make_moments()  # Megatron would make all of them on the device
        state_dict = with_groups_of_adam(state_dict, self.optimizer)
        super().load_state_dict(with_rates_of(state_dict, self.optimizer))
        self.host_states.keep_all(self.optimizer)
        if "param_state" in state_dict:  # without it, Megatron is only shaping a state to load into
            self.refresh_weights()

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Load the states of one file, then derive the weights. Every rank must call it."""
        super().load_parameter_state(filename, update_legacy_format=update_legacy_format)
        self.refresh_weights()

    def offload_to_cpu(self) -> None:
        """Move masters and moments to the host; a gather that reads them is finished first."""
        for group in self._managed_groups:
            group.forget_masters()
        self.host_states.call_them_the_hosts(self.optimizer)  # which Megatron then leaves alone
        super().offload_to_cpu()

    def restore_from_cpu(self) -> None:
        """Move masters and moments back, those at home on the host excepted."""
        self.host_states.call_them_the_devices(self.optimizer)
        super().restore_from_cpu()
        for group in self._managed_groups:
            group.forget_masters()

    def _quantize_with_megatron(self) -> None:
        """Have Megatron make its quantized weights of the masters, and gather them, now.

        Every rank must call it: each shard is quantized with the scale of its whole weight.
        """
        self.finish_gathers()
        super()._copy_main_params_to_model_params()
        self._start_gathers(self._all_groups(), force_sync=True)

    def refresh_weights(self) -> None:
        """Gather all quantized weights from the masters now. Every rank must call it.

        Raises:
            NonFiniteError: some master is Inf or NaN; nothing has been gathered.
        """
        if self.has_tensorwise:
            self._quantize_with_megatron()
        if self._buckets:
            check_masters(
                self,
                "No weight has been gathered from them. Load another checkpoint.",
                only=is_managed,
            )
        for group in self._managed_groups:
            group.forget_masters()
        self._record(Event.SETTLE)
        for group in self._managed_groups:
            group.start_param_sync(force_sync=True)
