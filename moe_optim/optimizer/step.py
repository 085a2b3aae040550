"""The fused step of a distributed optimizer: gradient norms in place, and one update.

Megatron's step copies gradients into the masters' ``grad``, computes the norm, scales, calls Adam
and copies masters into weights, parameter by parameter. A fused step plans all reads and writes
once and then launches a few kernels. Masters, moments and the step count stay where Megatron keeps
them, so fused and stock steps share checkpoints.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import (
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from moe_optim.buckets.bucket_group import GroupedBucketGroup
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import Event, Weights
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.kernels.adam_state import AdamState
from moe_optim.kernels.fields import HYPER_FIELDS
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.norm import NormInput, NormTable
from moe_optim.kernels.plan import has_kernels
from moe_optim.kernels.step_table import StepTable
from moe_optim.optimizer.adam import GroupStepAdam, hyper_of, moments_of
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
from moe_optim.optimizer.host_states import HostStates
from moe_optim.optimizer.step_hooks import (
    OwnStep,
    has_hooks,
    hooked,
    require_shown,
    showing_gradients,
)
from moe_optim.rules import Setup, why_stock_step
from moe_optim.weights.names import parameter_names

if TYPE_CHECKING:
    from moe_optim.weights.te.tensorwise import TensorwiseCast


class SteppedOptimizer(CheckpointedOptimizer):
    """Megatron's distributed optimizer, with the norms and the update of a fused step.

    A step of the chain calls :meth:`read_gradients`, :meth:`sum_squares`, :meth:`plan_update` and
    :meth:`update_masters`, in this order.

    Attributes:
        book: record of every input of a fused step.
        host_states: host-resident masters and moments.
        encoded: buckets whose masters a step encodes, as of the last plan.
        has_tensorwise: True if some weights have per-tensor scaling; the same on all ranks that
            share the buffers.
    """

    def __init__(self, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, config, *args, **kwargs)
        self.book = AddressBook(self)
        self.host_states = HostStates([], 0.0)
        self.has_tensorwise = False
        self._groups: list[GroupedBucketGroup] = []
        self._managed_groups: list[GroupedBucketGroup] = []
        self._buckets: tuple[ManagedBucket, ...] = ()
        self._own_step = OwnStep(optimizer)
        self._is_planned = False  # since gradients were read
        self._is_hooked = False  # whether hooks ran in the last update
        device = this_device()
        self._hyper = torch.zeros(0, HYPER_FIELDS, dtype=torch.float32, device=device)
        self._clips = torch.ones(len(NORMS), dtype=torch.float32, device=device)
        self._norm: NormTable | None = None
        self._norm_generation = 0
        self._tables: dict[ManagedBucket | None, StepTable] = {}
        self._tables_generation = 0
        self._planned: dict[ManagedBucket, tuple[tuple[int, int, int], MemberTable | None]] = {}
        self._cast: TensorwiseCast | None = None
        self._plans = 0
        self.encoded: list[ManagedBucket] = []

    @property
    def managed_buckets(self) -> tuple[ManagedBucket, ...]:
        """Buckets of quantized weights whose masters this optimizer steps."""
        return self._buckets

    def find_generation(self, bucket: ManagedBucket) -> int:
        """Return the generation of a managed bucket's masters and weights."""
        return self.book.check_bucket(bucket)

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
            group.require_gradients("optimizer.step()")
            group.require_weights("optimizer.step()")
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
        table = None if self._norm is None or self._norm.has_moved else self._norm
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
            and param_is_not_tensor_parallel_duplicate(master, **sharing)
            and param_is_not_gtp_duplicate(master)
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
        """
        self._own_step.require(self.optimizer)
        if self.grad_scaler is not None:
            raise StateError(
                "optimizer step: expected no loss scale, as when the optimizer was built, got a "
                f"{type(self.grad_scaler).__name__}. Set step: stock."
            )
        if self.book.check_states() != self._tables_generation or any(
            self._plan_bucket(bucket) != self._planned[bucket] for bucket in self._buckets
        ):
            self._tables, self._tables_generation = {}, 0  # in case the new plan is refused
            self._tables = self._plan_tables()
            self.encoded = [bucket for bucket in self._buckets if self._planned[bucket][1]]
            self._cast = self._plan_cast()
            self.book.tensorwise = None if self._cast is None else self._cast.fields
            self._tables_generation = self.book.check_states()  # planning creates moments
            self._plans += 1
        self._is_planned = True
        return self._plans

    def _plan_bucket(
        self, bucket: ManagedBucket
    ) -> tuple[tuple[int, int, int], MemberTable | None]:
        generation = self.book.check_bucket(bucket)
        members = bucket.plan_step(generation)
        # a bucket that has forgotten its masters does not tell whether they moved since
        return (generation, *bucket.plan_number), members

    def _plan_tables(self) -> dict[ManagedBucket | None, StepTable]:
        """Return one table per managed bucket, and one for all other parameters under None."""
        inner = self.optimizer
        group_of = self._find_groups_of_masters()
        if len(inner.param_groups) != len(self._hyper):
            self._hyper = self._hyper.new_zeros(len(inner.param_groups), HYPER_FIELDS)
        bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        names = parameter_names(self.model_chunks)
        states: dict[ManagedBucket | None, list[AdamState]] = {b: [] for b in self._buckets}
        states[None] = []
        self.make_moments()
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
                    on_host=self.host_states.on_host(master),
                )
            )
        decoupled = is_decoupled(inner)
        self._planned = {bucket: self._plan_bucket(bucket) for bucket in self._buckets}
        tables = {
            bucket: StepTable.build(
                of_bucket,
                self._hyper,
                self._clips,
                members=None if bucket is None else self._planned[bucket][1],
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
            self.host_states.keep(self.optimizer, master)

    # Update

    def update_masters(self, clips: Tensor) -> None:
        """Step masters and write this rank's weights in a few launches; see :meth:`launch`.

        Adam's step hooks run around the update, with clipped gradients in ``grad``; without such
        hooks, call :meth:`plan_update` first. Raises as :meth:`updating`, or if a hook made a
        change that a fused step cannot see.
        """
        with self.updating():
            if has_hooks(self.optimizer):
                self._update_hooked(clips)
            else:
                if not self._is_planned:  # a hook was removed since
                    self.plan_update()
                self._take_step(clips)
            if self.has_tensorwise:
                self._cast_tensorwise()

    def _update_hooked(self, clips: Tensor) -> None:
        """Step masters between Adam's hooks, which may move or overwrite any tensor."""
        with showing_gradients(self, clips) as remaining, self.hooks():
            if remaining is not clips:
                require_shown(self)
            self.plan_update()
            self._take_step(remaining)

    def _take_step(self, clips: Tensor) -> None:
        self.read_hyper()
        with self.counting():
            self.launch(clips)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Mark all managed buckets MOVING in a block that updates masters, then ENCODED or STALE.

        Call after :meth:`read_gradients`. An interrupted block leaves the weights STALE and the
        gradients SPENT.

        Raises:
            StateError: gradients were not reduced, weights are offloaded, or another optimizer was
                built for the model since.
        """
        self._is_hooked = False
        try:
            with self._moving_masters():
                yield
                # hooks may have written masters without a version counter
                encoded = () if self._is_hooked else self.encoded
                for bucket in self._buckets:
                    bucket.settle(encoded=bucket in encoded)
        finally:
            for group in self._groups:  # weights may have been written in part
                group.param_gather_dispatched = False

    @contextmanager
    def _moving_masters(self) -> Iterator[None]:
        """Mark all managed buckets MOVING; on exit mark the remaining ones STALE."""
        try:
            self._record(Event.STEP)
            yield
        finally:
            for bucket in self._buckets:
                if bucket.state.weights is Weights.MOVING:
                    bucket.state.record(Event.SETTLE)  # masters are partly stepped

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

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Call Adam's step hooks around a block; weights follow their writes to masters."""
        self._is_hooked = has_hooks(self.optimizer)
        with hooked(self.optimizer):
            yield
        if self._is_hooked:
            self._copy_unmanaged_params()

    def read_hyper(self) -> None:
        """Copy the next step's hyperparameters to the device. Call :meth:`plan_update` first."""
        # small pageable copies are staged at once, without a sync
        rows = torch.tensor(self._hyper_rows(), dtype=torch.float32, device="cpu")
        self._hyper.copy_(rows.view_as(self._hyper), non_blocking=True)

    def _hyper_rows(self) -> list[list[float]]:
        return [hyper_of(group).row() for group in self.optimizer.param_groups]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the step launched in a block, unless it fails before anything is written."""
        tables = list(self._tables.values())
        for table in tables:
            table.written.clear()
        try:
            yield
        except BaseException:
            if any(table.written for table in tables):
                self._count_steps(1)
            raise
        self._count_steps(1)

    def take_back(self) -> None:
        """Decrement the step count, after a step that changed nothing."""
        self._count_steps(-1)

    def _count_steps(self, steps: int) -> None:
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

    def _cast_tensorwise(self) -> None:
        """Cast masters to tensorwise weights. Every rank must call it."""
        if self._cast is None:
            super()._copy_main_params_to_model_params()
        else:
            self._cast.run(self.data_parallel_group)

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


# Norms and clipping


def reduced_over_ranks(of_parts: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the sum of all optimizers' tensors over all ranks. Every rank must call it.

    ``groups`` has one group if all optimizers share their ranks, else one per optimizer.
    """
    if len(groups) == 1:
        of_parts = [torch.stack(list(of_parts)).sum(0)]
    for found, group in zip(of_parts, groups, strict=True):
        dist.all_reduce(found, group=group)
    return torch.stack(list(of_parts)).sum(0)


def norms_of(squares: Tensor, config: Any) -> Tensor:
    """Return the square roots of ``squares``, [n] fp64, as fp32; Inf on overflow as in Megatron.

    Second moments are means of squared gradients, so the bound keeps them finite even without
    clipping. It is the bound of bf16 where second moments are stored in bf16.
    """
    is_narrow = config.use_precision_aware_optimizer
    held_in = config.exp_avg_sq_dtype if is_narrow else torch.float32
    return squares.where(squares <= torch.finfo(held_in).max, squares * torch.inf).sqrt().float()


def clip_factors(norms: Tensor, clip_grad: float, clipped: Sequence[bool] = ()) -> Tensor:
    """Return the clip factors ``min(1, clip_grad / (norm + 1e-6))``, as in Megatron.

    A ``clip_grad`` of 0 disables clipping. ``clipped`` states for each norm whether Megatron clips
    by it; empty for all.
    """
    if clip_grad <= 0.0:
        return torch.ones_like(norms)
    factors = (clip_grad / (norms + 1.0e-6)).clamp_max_(1.0)
    for index, is_clipped in enumerate(clipped):
        if not is_clipped:
            factors[index].fill_(1.0)  # assignment would copy from the host
    return factors


def as_megatron_returns(norm: Tensor) -> Any:
    """Return a norm, fp32 [1], as a tensor if Megatron's own is one, else as a number."""
    return norm if clip_grads.multi_tensor_scale_tensor_impl is not None else norm.item()


# Fusing decision


def setup_of(optimizer: Any, config: MoEOptimConfig) -> Setup:
    """Return the settings that decide whether steps of a part of a chain are fused."""
    inner = optimizer.optimizer
    is_torchs = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    setup = Setup(
        config=config,
        optimizer=optimizer.config,
        ddp=optimizer.ddp_config,
        masters_of_adam=optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
        adam=None if isinstance(inner, GroupStepAdam) or not is_torchs else type(inner).__name__,
    )
    if why_stock_step(setup):  # there may be no masters
        return setup
    return replace(setup, has_kernels=runs_on_kernels(optimizer))


def runs_on_kernels(optimizer: Any) -> bool:
    """Return whether kernels can update every master of an optimizer."""
    return all(has_kernels(master.device) for _, master in owned_masters(optimizer))


def this_device() -> torch.device:
    """Return the current device."""
    return torch.empty(
        0, dtype=torch.uint8, device=torch.cuda.current_device()
    ).device  # a CPU has no index
