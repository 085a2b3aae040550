"""The fused step: a norm over gradients where they lie, a decision, and one update.

Megatron's step copies gradients into masters' ``grad``, finds their norm, scales them, calls Adam
and copies masters into weights, parameter by parameter. Here everything that a step reads and
writes is planned once, and a step starts a few kernels. Masters, moments and the step count stay
where Megatron keeps them, so that checkpoints of either kind of step load in the other.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from moe_optim import ops
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import StateError
from moe_optim.formats.reference.adam import Hyper
from moe_optim.kernels.launch_table import HYPER_FIELDS
from moe_optim.kernels.member_table import MemberTable, has_kernels
from moe_optim.kernels.norm import Gradients, NormTable
from moe_optim.kernels.steps.table import AdamState, StepTable
from moe_optim.optimizer.adam import MOMENTS, GroupStepAdam
from moe_optim.optimizer.address_book import AddressBook, is_decoupled
from moe_optim.optimizer.norms import NORMS, norm_of
from moe_optim.optimizer.owned import flat_masters, gradient_of, owned_masters, weight_of
from moe_optim.rules import Setup, why_stock_step
from moe_optim.weights.names import parameter_names
from moe_optim.weights.te.tensorwise import TensorwiseCast, can_cast

logger = logging.getLogger(__name__)


class FusedUpdate:
    """The norm and the update of one distributed optimizer.

    Args:
        optimizer: a ``GroupedDistributedOptimizer`` whose step is fused.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._device = next(
            (master.device for _, master in owned_masters(optimizer)), this_device()
        )
        self._hyper = torch.zeros(0, HYPER_FIELDS, dtype=torch.float32, device=self._device)
        self._clips = torch.ones(len(NORMS), dtype=torch.float32, device=self._device)
        self._book = AddressBook(optimizer)
        self._norm: NormTable | None = None
        self._norm_is_of = 0  # the generation of the book that it was planned with
        self._tables: dict[ManagedBucket | None, StepTable] = {}
        self._tables_are_of = 0
        self._cast: TensorwiseCast | None = None
        self._plans = 0

    # The norm

    def sum_squares(self) -> Tensor:
        """Return the squared norms of what this rank owns, and its zeros if the configuration asks.

        Returns:
            [len(NORMS) + 1] fp64, newly allocated; the last is the number of zeros.

        Raises:
            StateError: a parameter has no gradient, or its memory is offloaded.
        """
        table = None if self._norm is None or self._norm.has_moved else self._norm
        if table is not None:
            ops.sum_squares(table)  # the device reads while the host compares
        generation = self._book.look_at_gradients()
        if table is None or generation != self._norm_is_of:
            self._norm = None  # so that a plan which is refused leaves none that looks current
            self._norm = table = self._plan_norm()
            self._norm_is_of = generation
            ops.sum_squares(table)
        return torch.cat([table.squares, table.zeros.double()])

    def _plan_norm(self) -> NormTable:
        """Describe the gradients that count: those of duplicates and shared parameters do not."""
        optimizer = self._optimizer
        sharing = {name: getattr(optimizer, name, None) for name in ("tp_group", "expert_tp_group")}
        counted = [
            Gradients(gradient_of(optimizer, param), norm_of(master))
            for param, master in owned_masters(optimizer)
            if param_is_not_shared(master)
            and param_is_not_tensor_parallel_duplicate(master, **sharing)
            and param_is_not_gtp_duplicate(master)
        ]
        return NormTable.build(
            counted,
            count_zeros=optimizer.config.log_num_zeros_in_grad,
            num_groups=len(NORMS),
            device=self._device,
        )

    # The update

    def plan(self) -> int:
        """Look whether anything has changed, and plan anew what has. No gather may be in flight.

        It follows :meth:`sum_squares`, which looks at gradients.

        Returns:
            What changes when something had to be planned anew, so that a captured graph is void.

        Raises:
            StateError: gradient memory is offloaded; masters and parameter groups do not fit.
            LayoutError: masters or moments are on the host, or of dtypes that no kernel knows.
        """
        if self._must_plan():
            self._tables = {}  # so that a plan which is refused leaves none that looks current
            self._tables = self._plan_tables()
            self._cast = self._plan_cast()
            self._tables_are_of = self._book.look_at_states()  # planning makes moments
            self._plans += 1
        return self._plans

    def read_hyper(self) -> None:
        """Copy what the next step takes from the host to the device. :meth:`plan` goes before."""
        groups = self._optimizer.optimizer.param_groups
        rows = [_hyper_of(group, step=_steps_of(group) + 1).row() for group in groups]
        # pageable memory of a few bytes is staged at once: nothing is waited for
        hyper = torch.tensor(rows, dtype=torch.float32, device="cpu").view_as(self._hyper)
        self._hyper.copy_(hyper, non_blocking=True)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the step that a block launches, unless it fails before anything is written."""
        tables = list(self._tables.values())
        for table in tables:
            table.written.clear()
        try:
            yield
        except BaseException:
            if any(table.written for table in tables):
                self._count(1)
            raise
        self._count(1)

    def take_back(self) -> None:
        """Do not count the last step: it has changed nothing."""
        self._count(-1)

    def _count(self, steps: int) -> None:
        for group in self._optimizer.optimizer.param_groups:
            group["step"] = _steps_of(group) + steps

    def step(self, clips: Tensor) -> None:
        """Take a step that has been planned, with the hyper-parameters of now, and count it.

        Args:
            clips: as of :meth:`launch`.
        """
        self.read_hyper()
        with self.counting():
            self.launch(clips)

    def launch(self, clips: Tensor) -> None:
        """Step all masters of this rank, and encode what blocks it has whole. Waits for nothing.

        Weights with one scale are cast by :meth:`cast_tensorwise`.

        Args:
            clips: [len(NORMS)] fp32 on the device: what gradients are multiplied by; below zero
                nothing moves.
        """
        self._clips.copy_(clips)
        for bucket in self.encoded:
            bucket.gather.prepare_step()
        with ExitStack() as stack:
            for stage in {one.stage for one in self._tables.values() if one.stage is not None}:
                stack.enter_context(stage.opened())  # so that no table waits for the one before
            for table in self._tables.values():
                ops.step(table)

    def cast_tensorwise(self) -> bool:
        """Cast masters to the weights that Megatron gathers. Every rank must call it.

        Returns:
            Whether it is known how; on all ranks alike.
        """
        if self._cast is not None:
            self._cast.run(self._optimizer.data_parallel_group)
        return self._cast is not None

    @property
    def encoded(self) -> Collection[ManagedBucket]:
        """The buckets that a step encodes masters for."""
        tables = self._tables.items()
        return [bucket for bucket, table in tables if bucket is not None and table.members]

    def make_moments(self) -> None:
        """Make moments of masters that have none, and have all states where they are at home."""
        inner = self._optimizer.optimizer
        for _, master in owned_masters(self._optimizer):
            moments_of(inner, master)
            self._optimizer.host_states.keep(inner, master)

    def _must_plan(self) -> bool:
        """Return whether something has changed, or gathers have been planned anew.

        Plans gathers on the way; where it ends early, :meth:`_plan_tables` asks the other buckets.

        Loading gives Adam other moments, and so do RL stacks that take turns on a GPU: tensors,
        dictionaries of them, or all of its state.
        """
        if not self._tables or self._book.look_at_states() != self._tables_are_of:
            return True
        if self._cast is not None and self._cast.has_moved:
            return True
        return any(
            table.has_moved or (bucket is not None and table.members is not bucket.plan_step())
            for bucket, table in self._tables.items()
        )

    def _plan_tables(self) -> dict[ManagedBucket | None, StepTable]:
        """Return a table for each managed bucket, and one for everything else under None."""
        optimizer = self._optimizer
        inner = optimizer.optimizer
        group_of = self._find_groups()
        if len(inner.param_groups) != len(self._hyper):
            self._hyper = self._hyper.new_zeros(len(inner.param_groups), HYPER_FIELDS)
        bucket_of = {param: bucket for bucket in optimizer._buckets for param in bucket.params}
        names = parameter_names(optimizer.model_chunks)
        states: dict[ManagedBucket | None, list[AdamState]] = {b: [] for b in optimizer._buckets}
        states[None] = []
        self.make_moments()
        for param, master in owned_masters(optimizer):
            exp_avg, exp_avg_sq = moments_of(inner, master)
            states[bucket_of.get(param)].append(
                AdamState(
                    parameter=names[param],
                    master=master,  # no view: it would stay where the memory of the master was
                    gradient=gradient_of(optimizer, param),
                    exp_avg=exp_avg,
                    exp_avg_sq=exp_avg_sq,
                    group=group_of[master],
                    norm=norm_of(master),
                    weight=weight_of(optimizer, param, master),
                    on_host=optimizer.host_states.on_host(master),
                )
            )
        decoupled = is_decoupled(inner)
        tables = {
            bucket: StepTable.build(
                of_bucket,
                self._hyper,
                self._clips,
                members=None if bucket is None else self._plan_members(bucket),
                decoupled=decoupled,
            )
            for bucket, of_bucket in states.items()
        }
        return {bucket: table.watching(_watched_of(table)) for bucket, table in tables.items()}

    def _find_groups(self) -> dict[Tensor, int]:
        """Return the number of the parameter group that each master is in.

        Raises:
            StateError: a master is in none, or in two, or something else is in one.
        """
        groups = self._optimizer.optimizer.param_groups
        placed = [(one, number) for number, group in enumerate(groups) for one in group["params"]]
        group_of = dict(placed)
        masters = set(flat_masters(self._optimizer))
        if len(placed) == len(group_of) and group_of.keys() == masters:
            return group_of
        missing, others = len(masters - group_of.keys()), len(group_of.keys() - masters)
        raise StateError(
            "optimizer step: expected every master of this optimizer in one parameter group, and "
            f"nothing else, got {missing} in none, {len(placed) - len(group_of)} once more, and "
            f"{others} other tensors. Put them back, or set step: stock."
        )

    def _plan_members(self, bucket: ManagedBucket) -> MemberTable | None:
        """Return what a step encodes masters into, of the masters that there are now."""
        members = bucket.plan_step()
        masters = set(flat_masters(self._optimizer))
        if members is not None and any(
            entry.source not in masters for entry in members.entries if entry.source.numel()
        ):
            bucket.forget_masters()
            members = bucket.plan_step()
        return members

    def _plan_cast(self) -> TensorwiseCast | None:
        """Return what casts the weights that Megatron gathers; None if that is left to it, too."""
        optimizer = self._optimizer
        if not optimizer.has_tensorwise:
            return None
        weights, masters, starts = optimizer._get_fp8_params_and_shard_fp32_from_fp8()
        return TensorwiseCast(weights, masters, starts) if can_cast(weights) else None


def setup_of(optimizer: Any, config: MoEOptimConfig) -> Setup:
    """Return what decides whether steps of an optimizer that has not stepped yet are fused.

    Args:
        optimizer: any part of a chain.
        config: settings of the plug-in.
    """
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
    """Return whether kernels update every master of an optimizer; also where it has none."""
    return all(has_kernels(master.device) for _, master in owned_masters(optimizer))


def moments_of(inner: Any, master: Tensor) -> tuple[Tensor, Tensor]:
    """Return both moments of a master, the optimizer's own tensors; zeros at the first step.

    Args:
        inner: Adam, as Megatron was given it.
        master: one of its parameters.
    """
    state = inner.state[master]
    if MOMENTS[0] not in state:
        if isinstance(inner, GroupStepAdam):
            inner.initialize_state(master)
        elif hasattr(inner, "initialize_state"):  # Transformer Engine's, whose moments have dtypes
            inner.initialize_state(master, False)
        else:
            state.update({name: torch.zeros_like(master.detach()) for name in MOMENTS})
    exp_avg, exp_avg_sq = (inner.state[master][name] for name in MOMENTS)
    return exp_avg, exp_avg_sq


def nothing_found() -> Tensor:
    """Return what :meth:`FusedUpdate.sum_squares` returns where nothing is owned."""
    return torch.zeros(len(NORMS) + 1, dtype=torch.float64, device=this_device())


def this_device() -> torch.device:
    """Return where this rank computes."""
    return torch.empty(
        0, dtype=torch.uint8, device=torch.cuda.current_device()
    ).device  # on a CPU that is no number


def _watched_of(table: StepTable) -> list[Tensor]:
    """Return tensors that tell whether a table has to be built anew, beside the address book.

    Of weights one of each piece of memory: they are views that nobody else has. Masters are the
    optimizer's own tensors, each with memory that can be exchanged; those that are encoded their
    bucket looks at. All else the address book knows.
    """
    weights = (one.weight for one in table.states)
    of_each_memory = {
        view.untyped_storage().data_ptr(): view
        for view in weights
        if view is not None and view.numel()
    }
    masters = [one.master for one in table.states] if table.members is None else []
    return [*masters, *of_each_memory.values()]


def _steps_of(group: dict[str, Any]) -> int:
    return int(group.get("step", 0))


def _hyper_of(group: dict[str, Any], *, step: int) -> Hyper:
    return Hyper(
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        bias_correction=bool(group.get("bias_correction", True)),
    )
