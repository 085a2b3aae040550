"""The distributed optimizer of quantized expert weights."""

import copy
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups, managed_buckets
from moe_optim.buckets.gather import OwnedMaster
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import Event
from moe_optim.checkpoint.param_groups import with_groups_of_adam, with_rates_of
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.optimizer.address_book import owned_masters
from moe_optim.optimizer.description import describe
from moe_optim.optimizer.host_states import HostStates
from moe_optim.optimizer.initial_values import keep_loaded_values, renew_initial_values
from moe_optim.optimizer.nonfinite import check_masters
from moe_optim.optimizer.step import SteppedOptimizer
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.managed import is_managed, storage_of
from moe_optim.weights.te.fields import is_tensorwise


class GroupedDistributedOptimizer(SteppedOptimizer):
    """Megatron's distributed optimizer, whose bucket groups gather quantized weights.

    Parameters without a quantized storage use Megatron's code unchanged. For managed buckets, a
    step ends with the weights ENCODED if it was fused, else STALE; see :class:`GroupedBucketGroup`.
    """

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Shard the masters; same arguments as Megatron's class.

        ``reuse_grad_buf_for_mxfp8_param_ag`` is turned off, since it would defer the weight update
        to the training loop.

        Raises:
            ConfigError: ``--optimizer-cpu-offload`` was passed to Megatron's factory instead of
                ours.
        """
        if config.optimizer_cpu_offload:  # which would step other masters
            raise ConfigError(
                "--optimizer-cpu-offload: expected moe_optim.get_megatron_optimizer to build the "
                "optimizer, got Megatron's function. Call ours in its place, with its arguments."
            )
        if config.reuse_grad_buf_for_mxfp8_param_ag:
            config = copy.copy(config)
            config.reuse_grad_buf_for_mxfp8_param_ag = False
        super().__init__(optimizer, config, *args, **kwargs)
        self._placed_groups: list[tuple[Any, Any]] = []
        if self.is_stub_optimizer or self.ddp_config.use_megatron_fsdp:
            return
        self._buckets = managed_buckets(b for buffer in self.buffers for b in buffer.buckets)
        params = (param for buffer in self.buffers for param in buffer.params)
        self.has_tensorwise = any(map(is_tensorwise, params))
        self._placed_groups = self._find_groups()
        groups = [group for _, group in self._placed_groups]
        self._groups = [group for group in groups if isinstance(group, GroupedBucketGroup)]
        self._managed_groups = [group for group in self._groups if group.managed]
        if self.moe_optim_config.offload_states:  # excludes masters held by Adam
            masters = [m for group in self.shard_fp32_from_float16_groups for m in group]
            self.host_states = HostStates(
                [master for master in masters if master is not None],
                self.moe_optim_config.offload_states,
            )
        for bucket in self._buckets:
            self._check_shards(bucket)
            bucket.owner = self  # replaces an optimizer built earlier
        for group in self._managed_groups:
            group.forget_masters()
        # Megatron drops these only for parameters with a shard on this rank, and never for frozen
        # ones; other optimizers still need theirs
        mine = {param for bucket in self._buckets for param in bucket.params}
        for param in (param for chunk in self.model_chunks for param in chunk.parameters()):
            if param in mine or (not param.requires_grad and is_managed(param)):
                param.quantized_storage.initial = None
        keep_loaded_values(self.model_chunks)
        self.book.check_masters()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.model_chunks, self).line})"

    def _find_groups(self) -> list[tuple[Any, Any]]:
        """Return this optimizer's bucket groups, of any class, with their model chunks."""
        mine = {id(bucket) for buffer in self.buffers for bucket in buffer.buckets}
        return [
            (chunk, group)
            for chunk in self.model_chunks
            for group in bucket_groups([chunk])
            if any(id(bucket) in mine for bucket in group.buckets)
        ]

    def finish_gathers(self) -> None:
        """Finish gathers in flight."""
        for group in self._groups:
            group.finish_gather()

    def masters_of(self, bucket: ManagedBucket) -> list[OwnedMaster]:
        """Return the masters of this rank's shard of ``bucket``, not copies."""
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
        """Raise LayoutError if Megatron's shards differ from the bucket's slots."""
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
        """Allocate the masters without slicing quantized bytes as elements."""
        if any(is_managed(param) for param in param_gbuf_map):
            renew_initial_values(param_gbuf_map)
            config = copy.copy(config)
            config.fp8_recipe = None  # "delayed", Megatron's default, would slice them
        return super()._build_model_and_main_param_groups(
            gbuf_ranges, param_gbuf_map, opt_group_ranges, config
        )

    @classmethod
    def _is_fp8_param_for_param_gather(cls, tensor: Tensor) -> bool:
        """Return whether Megatron quantizes ``tensor``; False for managed weights."""
        return not is_managed(tensor) and super()._is_fp8_param_for_param_gather(tensor)

    @staticmethod
    def _is_grouped_quantized_tensor(tensor: Tensor) -> bool:
        """Return whether Megatron must leave the bytes of ``tensor`` alone."""
        return isinstance(
            tensor, GroupedWeight
        ) or DistributedOptimizer._is_grouped_quantized_tensor(tensor)

    def _copy_model_grads_to_main_grads(self) -> None:
        """Copy this rank's gradients; raises as :meth:`read_gradients`."""
        self.read_gradients()
        super()._copy_model_grads_to_main_grads()

    def step_with_ready_grads(self) -> bool:
        """Step as Megatron does; see :meth:`updating`, but managed buckets end STALE."""
        with self._moving_masters():
            return super().step_with_ready_grads()

    def _copy_main_params_to_model_params(self) -> None:
        """Write this rank's bf16 and fp32 weights, and mark managed buckets STALE."""
        if self._buckets:
            self._copy_unmanaged_params()
        else:
            super()._copy_main_params_to_model_params()
        for group in self._groups:
            group.param_gather_dispatched = False  # even after a gather
        self._record(Event.SETTLE)

    def gather_unless_overlapped(self) -> None:
        """Gather stale weights, unless forward passes do. Every rank must call it.

        Call right after :meth:`update_masters`, before anything can move masters or weights.
        """
        if not self.ddp_config.overlap_param_gather:
            self._start_gathers(unmoved=not self._is_hooked)

    def start_param_sync_for_bucket_group_subset(self) -> None:
        """Start the gathers of this optimizer's groups. Every rank must call it.

        Megatron starts those of all groups of a chunk, once per optimizer that has stepped.
        """
        self._start_gathers()

    def _start_gathers(self, *, force_sync: bool = False, unmoved: bool = False) -> None:
        for chunk, group in self._placed_groups:
            if isinstance(group, GroupedBucketGroup) and group.managed:
                group.gather(force_sync=force_sync, unmoved=unmoved)
            else:
                chunk._start_bucket_group_param_sync(group, force_sync=force_sync)

    def _copy_main_params_to_param_buffer(self) -> None:
        """Do nothing: managed buckets read masters when they gather; others are up to date."""

    def prepare_model_params_for_param_sync(self) -> None:
        """Do nothing; see :meth:`_copy_main_params_to_param_buffer`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, including delayed weight gradients."""
        super().zero_grad(set_to_none)
        for linear in self._delaying_linears:
            linear.drop_delayed_wgrads()

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Derive masters from the weights, then weights from the masters. Every rank must call it.

        Args:
            state_dict: model state dict to use in place of the current weights, with experts in any
                layout; not modified.

        Raises:
            LayoutError: a parameter is missing, duplicated or misshapen in ``state_dict``.
        """
        super()._copy_model_params_to_main_params(state_dict=state_dict)
        if state_dict is None:
            self._take_loaded_values()
        self.refresh_weights()

    def _take_loaded_values(self) -> None:
        for one in (one for bucket in self._buckets for one in self.masters_of(bucket)):
            loaded = storage_of(one.param).initial
            if loaded is not None:
                values = loaded.reshape(-1)[one.start : one.start + one.master.numel()]
                one.master.copy_(values)

    def _build_model_param_to_state_dict_param_map(
        self, state_dict: dict[str, Any]
    ) -> dict[torch.nn.Parameter, Tensor]:
        """Return the values of every parameter by its full name; Megatron matches suffixes."""
        from moe_optim.checkpoint.model_values import model_values_for

        return model_values_for(self.model_chunks, state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters and moments, and requantize the weights from the masters.

        Megatron loads weights and masters separately, and requantizes dequantized values, which
        changes the scale of about one block in twenty. Every rank must call it.
        """
        if self.host_states.numel:
            self.make_moments()  # Megatron would create all on the device
        state_dict = with_groups_of_adam(state_dict, self.optimizer)
        super().load_state_dict(with_rates_of(state_dict, self.optimizer))
        self.host_states.keep_all(self.optimizer)
        if "param_state" in state_dict:  # else Megatron only builds a template
            self.refresh_weights()

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Load states from one file, then requantize the weights. Every rank must call it."""
        super().load_parameter_state(filename, update_legacy_format=update_legacy_format)
        self.refresh_weights()

    def offload_to_cpu(self) -> None:
        """Move masters and moments to the host, after finishing gathers that read them."""
        for group in self._managed_groups:
            group.forget_masters()
        self.host_states.call_them_the_hosts(self.optimizer)  # Megatron then skips them
        super().offload_to_cpu()

    def restore_from_cpu(self) -> None:
        """Move masters and moments back, except for host-resident ones."""
        self.host_states.call_them_the_devices(self.optimizer)
        super().restore_from_cpu()
        for group in self._managed_groups:
            group.forget_masters()

    def _quantize_with_megatron(self) -> None:
        """Let Megatron quantize tensorwise weights. Every rank must call it."""
        self.finish_gathers()
        super()._copy_main_params_to_model_params()
        self._start_gathers(force_sync=True)

    def refresh_weights(self) -> None:
        """Gather all quantized weights from the masters now. Every rank must call it.

        Raises:
            NonFiniteError: a master is Inf or NaN; nothing was gathered.
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
