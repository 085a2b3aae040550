"""The distributed optimizer of quantized expert weights, and its fused step.

Megatron's step copies gradients into the masters' ``grad``, computes the norm, scales, calls Adam
and copies masters into weights, parameter by parameter. A fused step plans all reads and writes
once and then launches a few kernels. Masters, moments and the step count stay where Megatron keeps
them, so fused and stock steps share checkpoints.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from moe_optim import checkpoint
from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups, managed_buckets
from moe_optim.buckets.gather import OwnedMaster
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import Event, Weights
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats.reference.adam import Hyper
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.norm import NormInput, NormTable
from moe_optim.kernels.step_table import StepTable
from moe_optim.optimizer.adam import moments_of, require_descent
from moe_optim.optimizer.address_book import (
    NORMS,
    AddressBook,
    flat_masters,
    gradient_of,
    is_decoupled,
    norm_of,
    owned_masters,
    weight_of,
)
from moe_optim.optimizer.checkpointed import CheckpointedOptimizer
from moe_optim.optimizer.description import describe
from moe_optim.optimizer.nonfinite import check_masters
from moe_optim.optimizer.step_hooks import (
    has_hooks,
    hooked,
    require_own_step,
    require_shown,
    showing_gradients,
)
from moe_optim.places import this_device
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.managed import (
    is_managed,
    keep_loaded_values,
    renew_initial_values,
    storage_of,
)
from moe_optim.weights.names import parameter_names
from moe_optim.weights.te.fields import is_tensorwise

if TYPE_CHECKING:
    from moe_optim.optimizer.host_states import HostStates
    from moe_optim.weights.te.tensorwise import TensorwiseCast


if hasattr(DistributedDataParallelConfig, "use_layer_wise_param_layout"):  # Megatron's dev branch
    _is_first_shard = getattr(tensor_parallel, "param_is_not_gtp_duplicate", lambda _: True)
else:
    _is_first_shard = tensor_parallel.param_is_not_gtp_duplicate


class GroupedDistributedOptimizer(CheckpointedOptimizer):
    """Megatron's distributed optimizer, whose bucket groups gather quantized weights.

    Parameters without a quantized storage use Megatron's code unchanged. For managed buckets, a
    step ends with the weights ENCODED if it was fused, else STALE; see :class:`GroupedBucketGroup`.

    A fused step of the chain calls :meth:`read_gradients`, :meth:`sum_squares`,
    :meth:`plan_update`, :meth:`update_masters` and :meth:`start_gathers`, in this order.

    Attributes:
        managed_buckets: buckets of quantized weights whose masters this optimizer steps.
        book: record of every input of a fused step.
        host_states: host-resident masters and moments; None without ``offload_states``.
        encoded: buckets whose masters a step encodes, as of the last plan.
        has_tensorwise: True if some weights have per-tensor scaling; the same on all ranks that
            share the buffers.
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
                "optimizer, got Megatron's function. Call ours instead, with its arguments."
            )
        if config.reuse_grad_buf_for_mxfp8_param_ag:
            config = copy.copy(config)
            config.reuse_grad_buf_for_mxfp8_param_ag = False
        super().__init__(optimizer, config, *args, **kwargs)
        self.managed_buckets: tuple[ManagedBucket, ...] = ()
        self.book = AddressBook(self)
        self.host_states: HostStates | None = None
        self.encoded: list[ManagedBucket] = []
        self.has_tensorwise = False
        self._placed_groups: list[tuple[Any, Any]] = []  # of any class, with their model chunks
        self._groups: list[GroupedBucketGroup] = []
        self._managed_groups: list[GroupedBucketGroup] = []
        self._built = optimizer, getattr(type(optimizer), "step", None)
        self._is_planned = False  # since gradients were read
        self._is_hooked = False  # whether hooks ran in the last update
        device = this_device()
        self._hyper = torch.zeros(0, HYPER_FIELDS, dtype=torch.float32, device=device)
        self._clips = torch.ones(len(NORMS), dtype=torch.float32, device=device)
        self._norm: NormTable | None = None
        self._norm_generation = 0
        self._tables: dict[ManagedBucket | None, StepTable] = {}
        self._inputs: list[object] = []  # that the tables were built for
        self._cast: TensorwiseCast | None = None
        self._plans = 0
        if not self.is_stub_optimizer and not self.ddp_config.use_megatron_fsdp:
            self._own_buckets()

    def _own_buckets(self) -> None:
        """Become the owner of the buckets, and drop initial values: masters have them by now."""
        buckets = [bucket for buffer in self.buffers for bucket in buffer.buckets]
        self.managed_buckets = managed_buckets(buckets)
        self.has_tensorwise = any(
            is_tensorwise(p) for buffer in self.buffers for p in buffer.params
        )
        mine = set(map(id, buckets))
        self._placed_groups = [
            (chunk, group)
            for chunk in self.model_chunks
            for group in bucket_groups([chunk])
            if any(id(bucket) in mine for bucket in group.buckets)
        ]
        groups = [group for _, group in self._placed_groups]
        self._groups = [group for group in groups if isinstance(group, GroupedBucketGroup)]
        self._managed_groups = [group for group in self._groups if group.managed]
        if self.moe_optim_config.offload_states:  # excludes masters held by Adam
            from moe_optim.optimizer.host_states import HostStates

            masters = [m for group in self.shard_fp32_from_float16_groups for m in group]
            self.host_states = HostStates(
                [master for master in masters if master is not None],
                self.moe_optim_config.offload_states,
            )
        for bucket in self.managed_buckets:
            self._check_shards(bucket)
            bucket.owner = self  # replaces an optimizer built earlier
        for group in self._managed_groups:
            group.forget_masters()
        # Megatron drops these only for parameters with a shard on this rank, and never for frozen
        # ones; other optimizers still need theirs
        held = {param for bucket in self.managed_buckets for param in bucket.params}
        for param in (param for chunk in self.model_chunks for param in chunk.parameters()):
            if param in held or (not param.requires_grad and is_managed(param)):
                param.quantized_storage.initial = None
        keep_loaded_values(self.model_chunks)
        self.book.check_masters()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.model_chunks, self).line})"

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
        rank = self.data_parallel_group.rank()
        planned = sum(len(slot.owned(rank, bucket.shard_numel)) for slot in bucket.slots)
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

    # Gradients

    def read_gradients(self) -> None:
        """Finish gathers in flight, and check that this rank's gradients are readable.

        Raises:
            StateError: gradients were not reduced, gradient or weight memory is offloaded, or some
                experts have delayed weight gradients.
        """
        self._is_planned = False
        for linear in self._delaying_linears:
            linear.require_wgrads_taken()
        for group in self._groups:
            group.finish_gather()  # which reads memory that the step writes
            group.require_memory("optimizer.step()")
        for group in self._managed_groups:
            group.read_gradients()

    @cached_property
    def _delaying_linears(self) -> tuple[GroupedLinear, ...]:
        modules = (module for chunk in self.model_chunks for module in chunk.modules())
        linears = (module for module in modules if isinstance(module, GroupedLinear))
        return tuple(linear for linear in linears if linear.delay_wgrad)

    def sum_squares(self) -> Tensor:
        """Return this rank's squared norms and zero count, [len(NORMS) + 1] fp64, newly allocated.

        Raises:
            StateError: a parameter has no gradient, or gradient memory is offloaded.
        """
        table = self._norm
        if table is not None and table.places.have_moved:
            table = None
        if table is not None:
            table.launch()  # runs while the host compares
        generation = self.book.check_gradients()
        if table is None or generation != self._norm_generation:
            self._norm = None  # in case the new plan is refused
            self._norm = table = self._plan_norm()
            self._norm_generation = generation
            table.launch()
        return torch.cat([table.squares, table.zeros.double()])

    def _plan_norm(self) -> NormTable:
        """Plan the norm over all gradients except those of duplicates and shared parameters."""
        sharing = {name: getattr(self, name, None) for name in ("tp_group", "expert_tp_group")}
        counted = [
            NormInput(gradient_of(self, param), norm_of(master))
            for param, master in owned_masters(self)
            if param_is_not_shared(master)
            and tensor_parallel.param_is_not_tensor_parallel_duplicate(master, **sharing)
            and _is_first_shard(master)
        ]
        return NormTable.build(
            counted,
            count_zeros=self.config.log_num_zeros_in_grad,
            num_groups=len(NORMS),
            device=self._clips.device,
        )

    # Plans

    def plan_update(self) -> int:
        """Check all inputs of the update, and rebuild the plans whose inputs changed.

        Call after :meth:`sum_squares`. Runs on the host, without a device synchronization. Loads
        replace moments, and so do RL stacks that share a GPU. Returns the number of rebuilds; a
        change invalidates captured graphs.

        Raises:
            StateError: Adam's ``step`` was replaced, a loss scale was set, gradient memory is
                offloaded, or parameter groups do not match the masters.
            LayoutError: masters or moments are on the host, or have dtypes without a kernel.
            ConfigError: a parameter group sets ``amsgrad`` or ``maximize``.
        """
        require_own_step(self.optimizer, *self._built)
        require_descent(self.optimizer)
        if self.grad_scaler is not None:
            raise StateError(
                "optimizer step: expected no loss scale, as when the optimizer was built, got a "
                f"{type(self.grad_scaler).__name__}. Set step: stock."
            )
        if self._find_inputs() != self._inputs:
            self._tables, self._inputs = {}, []  # in case the new plan is refused
            self._tables = self._plan_tables()
            self.encoded = [bucket for bucket in self.managed_buckets if bucket.step_table]
            self._cast = self._plan_cast()
            self.book.tensorwise = None if self._cast is None else self._cast.fields
            self._inputs = self._find_inputs()  # planning creates moments
            self._plans += 1
        self._is_planned = True
        return self._plans

    def _find_inputs(self) -> list[object]:
        """Return the generations of everything that an update depends on."""
        return [self.book.check_states(), *map(self._plan_bucket, self.managed_buckets)]

    def _plan_bucket(self, bucket: ManagedBucket) -> tuple[object, ...]:
        generation = self.book.check_bucket(bucket)
        members = bucket.plan_step(generation)
        # a bucket that has forgotten its masters does not tell whether they moved since
        return generation, bucket.plan_number, members

    def _plan_tables(self) -> dict[ManagedBucket | None, StepTable]:
        """Return one table per managed bucket, and one for all other parameters under None."""
        inner = self.optimizer
        group_of = self._find_groups_of_masters()
        if len(inner.param_groups) != len(self._hyper):
            self._hyper = self._hyper.new_zeros(len(inner.param_groups), HYPER_FIELDS)
        bucket_of = {param: bucket for bucket in self.managed_buckets for param in bucket.params}
        names = parameter_names(self.model_chunks)
        states: dict[ManagedBucket | None, list[AdamState]] = {b: [] for b in self.managed_buckets}
        states[None] = []
        self.make_moments()
        host_states = self.host_states
        for param, master in owned_masters(self):
            exp_avg, exp_avg_sq = moments_of(inner, master)
            states[bucket_of.get(param)].append(
                AdamState(
                    parameter=names[param],
                    master=master,  # no view: it would keep the old memory
                    gradient=gradient_of(self, param),
                    exp_avg=exp_avg,
                    exp_avg_sq=exp_avg_sq,
                    group=group_of[master],
                    norm=norm_of(master),
                    weight=weight_of(self, param, master),
                    on_host=None if host_states is None else host_states.on_host(master),
                )
            )
        decoupled = is_decoupled(inner)
        for bucket in self.managed_buckets:
            self._plan_bucket(bucket)
        tables = {
            bucket: StepTable.build(
                of_bucket,
                self._hyper,
                self._clips,
                members=None if bucket is None else bucket.step_table,
                decoupled=decoupled,
            )
            for bucket, of_bucket in states.items()
        }
        # holds no moments, so that offloading frees them: the address book tracks their addresses
        return {bucket: table.watching(()) for bucket, table in tables.items()}

    def _find_groups_of_masters(self) -> dict[Tensor, int]:
        """Return the parameter group index of each master; raise StateError unless it is unique."""
        groups = self.optimizer.param_groups
        placed = [(one, number) for number, group in enumerate(groups) for one in group["params"]]
        group_of = dict(placed)
        masters = set(flat_masters(self))
        if len(placed) == len(group_of) and group_of.keys() == masters:
            return group_of
        missing, others = len(masters - group_of.keys()), len(group_of.keys() - masters)
        raise StateError(
            "optimizer step: expected every master of this optimizer in one parameter group, and "
            f"nothing else, got {missing} in none, {len(placed) - len(group_of)} once more, and "
            f"{others} other tensors. Put them back, or set step: stock."
        )

    def _plan_cast(self) -> "TensorwiseCast | None":
        if not self.has_tensorwise:
            return None
        from moe_optim.weights.te.tensorwise import TensorwiseCast, can_cast

        weights, masters, starts = self._get_fp8_params_and_shard_fp32_from_fp8()
        return TensorwiseCast(weights, masters, starts) if can_cast(weights) else None

    def make_moments(self) -> None:
        """Create missing moments, and move host-resident states to the host."""
        for _, master in owned_masters(self):
            moments_of(self.optimizer, master)
            if self.host_states is not None:
                self.host_states.keep(self.optimizer, master)

    # Update

    def update_masters(self, clips: Tensor) -> None:
        """Step masters and write this rank's weights in a few launches; see :meth:`launch`.

        Adam's step hooks run around the update, with clipped gradients in ``grad``; without such
        hooks, call :meth:`plan_update` first. Raises as :meth:`updating`, or if a hook made a
        change that a fused step cannot see.
        """
        with self.updating():
            if has_hooks(self.optimizer):  # which may move or overwrite any tensor
                with showing_gradients(self, clips) as remaining, self.hooks():
                    if remaining is not clips:
                        require_shown(self)
                    self.plan_update()
                    with self.counting():
                        self.launch(remaining)
            else:
                if not self._is_planned:  # a hook was removed since
                    self.plan_update()
                with self.counting():
                    self.launch(clips)
            if self.has_tensorwise and self._cast is not None:
                self._cast.run(self.data_parallel_group)
            elif self.has_tensorwise:
                super()._copy_main_params_to_model_params()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Mark all managed buckets MOVING in a block that updates masters, then ENCODED or STALE.

        Call after :meth:`read_gradients`. An interrupted block leaves the weights STALE and the
        gradients SPENT.

        Raises:
            StateError: gradients were not reduced, weights are offloaded, or another optimizer was
                built for the model since.
        """
        encoded: Collection[ManagedBucket] = ()  # of a step that ends
        self._is_hooked = False
        for group in self._groups:  # weights may be written in part
            group.param_gather_dispatched = False
        try:
            self._record(Event.STEP)
            yield
            # hooks may have written masters without a version counter
            encoded = () if self._is_hooked else self.encoded
        finally:
            for bucket in self.managed_buckets:
                if bucket.state.weights is Weights.MOVING:
                    bucket.settle(encoded=bucket in encoded)

    def _record(self, event: Event) -> None:
        for bucket in self.managed_buckets:
            if bucket.owner is not self:
                raise StateError(
                    f"{bucket.name}: expected a step of the optimizer that was built last for this "
                    "model, got one of an earlier one, whose masters are no longer gathered. Step "
                    "the last one, and drop the others."
                )
        for bucket in self.managed_buckets:
            bucket.state.record(event)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Call Adam's step hooks around a block; weights follow their writes to masters."""
        self._is_hooked = has_hooks(self.optimizer)
        with hooked(self.optimizer):
            yield
        if self._is_hooked:
            self._copy_unmanaged_params()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Copy hyperparameters to the device, and count the step that is launched in a block.

        Call :meth:`plan_update` first. A step that fails before anything is written does not count.
        """
        # small pageable copies are staged at once, without a sync
        rows = torch.tensor(self._hyper_rows(), dtype=torch.float32, device="cpu")
        self._hyper.copy_(rows.view_as(self._hyper), non_blocking=True)
        tables = list(self._tables.values())
        for table in tables:
            table.written.clear()
        try:
            yield
        except BaseException:
            if any(table.written for table in tables):
                self.count_steps(1)
            raise
        self.count_steps(1)

    def _hyper_rows(self) -> list[list[float]]:
        """Return the hyperparameters of every parameter group for its next step."""
        return [
            Hyper(
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=int(group.get("step", 0)) + 1,
                bias_correction=bool(group.get("bias_correction", True)),
            ).row()
            for group in self.optimizer.param_groups
        ]

    def count_steps(self, steps: int) -> None:
        """Add to the step count: -1 takes back a step that changed nothing."""
        for group in self.optimizer.param_groups:
            group["step"] = int(group.get("step", 0)) + steps

    def launch(self, clips: Tensor) -> None:
        """Step all masters of this rank, and encode whole blocks, without a device synchronization.

        ``clips`` are clip factors by norm, [len(NORMS)] fp32; negative ones disable the update.
        """
        self._clips.copy_(clips)
        for bucket in self.encoded:
            bucket.gather.prepare_step()
        with ExitStack() as stack:
            for stage in {one.stage for one in self._tables.values() if one.stage is not None}:
                stack.enter_context(stage.opened())  # so that tables do not wait for each other
            for table in self._tables.values():
                table.launch()

    def _copy_unmanaged_params(self) -> None:
        """Write the same weights as Megatron's method, without a range lookup per expert."""
        self.book.check_masters()
        weights, masters = [], []
        for param, master in self.book.unmanaged:
            weight = weight_of(self, param, master)
            if weight is not None:
                weights.append(weight)
                masters.append(master.detach())
        if weights:
            torch._foreach_copy_(weights, masters)

    # Megatron's step, gathers and loads

    def _copy_model_grads_to_main_grads(self) -> None:
        """Copy this rank's gradients; raises as :meth:`read_gradients`."""
        self.read_gradients()
        super()._copy_model_grads_to_main_grads()

    def step_with_ready_grads(self) -> bool:
        """Step as Megatron does; see :meth:`updating`, but managed buckets end STALE."""
        with self.updating():
            is_updated = super().step_with_ready_grads()
        for _, group in self._gathered_in_step if is_updated else ():
            group.start_param_sync()
        return is_updated

    @property
    def _gathered_in_step(self) -> list[tuple[Any, Any]]:
        """Groups of ``--overlap-param-gather-with-optimizer-step``: the first chunk's."""
        return [
            placed
            for placed in self._placed_groups
            if placed[0].overlap_param_gather_with_optimizer_step
        ]

    def _copy_main_params_to_model_params(self) -> None:
        """Write this rank's bf16 and fp32 weights, and mark managed buckets STALE."""
        if self.managed_buckets:
            self._copy_unmanaged_params()
        else:
            super()._copy_main_params_to_model_params()
        for group in self._groups:
            group.param_gather_dispatched = False  # even after a gather
        self._record(Event.SETTLE)

    def start_param_sync_for_bucket_group_subset(self, force_sync: bool = False) -> None:
        """Start the gathers of this optimizer's groups. Every rank must call it.

        Megatron starts those of all groups of a chunk, once per optimizer that has stepped.
        """
        self.start_gathers(force_sync=force_sync)

    def start_gathers(self, *, force_sync: bool = False, after_update: bool = False) -> None:
        """Gather stale weights. Every rank must call it.

        Args:
            force_sync: whether to wait for the weights.
            after_update: whether the call follows :meth:`update_masters`, before anything can move
                masters or weights. It then starts only what forward passes do not gather.
        """
        placed = self._placed_groups
        if after_update and self.ddp_config.overlap_param_gather:
            placed = self._gathered_in_step
        unmoved = after_update and not self._is_hooked
        for chunk, group in placed:
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
        self.derive_masters(state_dict)
        self.refresh_weights()

    def require_weights(self, what: str) -> None:
        """Raise StateError before ``what`` if weights of this optimizer are offloaded."""
        for group in self._groups:
            group.require_memory(what, gradients=False)
        for bucket in self.managed_buckets:
            for param in bucket.params:
                storage_of(param).require_present()

    def derive_masters(self, state_dict: dict[str, Any] | None) -> None:
        """Derive masters without communication; :meth:`gather_weights` must follow."""
        super()._copy_model_params_to_main_params(state_dict=state_dict)
        for bucket in self.managed_buckets if state_dict is None else ():
            for one in self.masters_of(bucket):
                loaded = storage_of(one.param).initial
                if loaded is not None:
                    values = loaded.reshape(-1)[one.start : one.start + one.master.numel()]
                    one.master.copy_(values)

    def _build_model_param_to_state_dict_param_map(
        self, state_dict: dict[str, Any]
    ) -> dict[torch.nn.Parameter, Tensor]:
        """Return the values of every parameter by its full name; Megatron matches suffixes."""
        return checkpoint.model_values.model_values_for(self.model_chunks, state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters and moments, and requantize the weights from the masters.

        Megatron loads weights and masters separately, and requantizes dequantized values, which
        changes the scale of about one block in twenty. Every rank must call it.
        """
        self.load_states(state_dict)
        if "param_state" in state_dict:  # else Megatron only builds a template
            self.refresh_weights()

    def load_states(self, state_dict: dict[str, Any]) -> None:
        """Load masters and moments as they are; :meth:`gather_weights` must follow."""
        if self.host_states is not None:
            self.make_moments()  # Megatron would create all on the device
        state_dict = checkpoint.param_groups.with_own_groups(state_dict, self.optimizer)
        before = [{**group} for group in self.optimizer.param_groups]
        super().load_state_dict(state_dict)
        saved = state_dict["optimizer"]["param_groups"]
        checkpoint.param_groups.set_groups(self.optimizer, before, saved)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Load states from one file, then requantize the weights. Every rank must call it."""
        super().load_parameter_state(filename, update_legacy_format=update_legacy_format)
        self.refresh_weights()

    def offload_to_cpu(self) -> None:
        """Move masters and moments to the host, after finishing gathers that read them."""
        for group in self._managed_groups:
            group.forget_masters()
        if self.host_states is not None:
            self.host_states.call_them_the_hosts(self.optimizer)  # Megatron then skips them
        super().offload_to_cpu()

    def restore_from_cpu(self) -> None:
        """Move masters and moments back, except for host-resident ones."""
        if self.host_states is not None:
            self.host_states.call_them_the_devices(self.optimizer)
        super().restore_from_cpu()
        for group in self._managed_groups:
            group.forget_masters()

    def refresh_weights(self) -> None:
        """Gather all quantized weights from the masters now. Every rank must call it.

        Raises:
            NonFiniteError: a master is Inf or NaN; nothing was gathered.
        """
        check_masters([self])
        self.gather_weights()

    def gather_weights(self) -> None:
        """Gather all quantized weights from masters that are finite. Every rank must call it."""
        if self.has_tensorwise:  # Megatron quantizes these
            self.finish_gathers()
            super()._copy_main_params_to_model_params()
            self.start_gathers(force_sync=True)
        for group in self._managed_groups:
            group.forget_masters()
        self._record(Event.SETTLE)
        for group in self._managed_groups:
            group.gather(force_sync=True)
