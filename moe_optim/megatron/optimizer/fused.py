"""The fused step: a norm over gradients where they lie, a decision, and one update.

Megatron's step copies gradients into masters' ``grad``, finds their norm, scales them, calls Adam
and copies masters into weights, parameter by parameter. Here everything that a step reads and
writes is planned once, and a step starts a few kernels. Masters, moments and the step count stay
where Megatron keeps them, so that checkpoints of either kind of step load in the other.
"""

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import call, is_not, itemgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import (
    SEPARATE_GRAD_NORM_GROUPS,
    _get_param_grad_norm_group,
)
from megatron.core.tensor_parallel import (
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import log_single_rank
from torch import Tensor

from moe_optim import ops
from moe_optim.errors import StateError
from moe_optim.kernels.launch_table import HYPER_FIELDS
from moe_optim.kernels.member_table import has_kernels
from moe_optim.kernels.norm import Gradients, NormTable
from moe_optim.kernels.steps.table import AdamState, StepTable
from moe_optim.megatron.buffers.managed_bucket import ManagedBucket
from moe_optim.megatron.optimizer.adam import MOMENTS, GroupStepAdam
from moe_optim.megatron.planning import settings_of_stocks_step
from moe_optim.megatron.te.tensorwise import TensorwiseCast, can_cast
from moe_optim.megatron.weights.managed import is_left_to_megatron, is_managed
from moe_optim.megatron.weights.names import parameter_names
from moe_optim.places import addresses_of
from moe_optim.reference.adam import Hyper

logger = logging.getLogger(__name__)

_MOMENTS = itemgetter(*MOMENTS)
NORMS = (None, *sorted(SEPARATE_GRAD_NORM_GROUPS))
"""What gradients count in: the main norm, and those that Megatron keeps apart."""


class FusedUpdate:
    """The norm and the update of one distributed optimizer.

    Args:
        optimizer: a ``GroupedDistributedOptimizer`` that :func:`why_not_fused` has nothing against.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._device = next(
            (master.device for _, master in owned_masters(optimizer)), this_device()
        )
        num_groups = len(optimizer.optimizer.param_groups)
        self._hyper = torch.zeros(
            num_groups, HYPER_FIELDS, dtype=torch.float32, device=self._device
        )
        self._clips = torch.ones(len(NORMS), dtype=torch.float32, device=self._device)
        self._norm: NormTable | None = None
        self._tables: dict[ManagedBucket | None, StepTable] = {}
        self._cast: TensorwiseCast | None = None
        self._plans = 0
        self._moments: list[ref[Tensor]] = []
        self._addresses: list[int] = []

    # The norm

    def sum_squares(self) -> Tensor:
        """Return the squared norms of what this rank owns, and its zeros if the configuration asks.

        Returns:
            [len(NORMS) + 1] fp64, newly allocated; the last is the number of zeros.

        Raises:
            StateError: gradient memory is offloaded.
        """
        if self._norm is None or self._norm.has_moved:
            self._norm = self._plan_norm()
        ops.sum_squares(self._norm)
        return torch.cat([self._norm.squares, self._norm.zeros.double()])

    def _plan_norm(self) -> NormTable:
        """Describe the gradients that count: those of duplicates and shared parameters do not."""
        optimizer = self._optimizer
        sharing = {name: getattr(optimizer, name, None) for name in ("tp_group", "expert_tp_group")}
        counted = [
            Gradients(gradient_of(optimizer, param), _norm_of(master))
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
        """Look whether anything has moved, and plan anew what has. No gather may be in flight.

        Returns:
            What changes when something had to be planned anew, so that a captured graph is void.

        Raises:
            StateError: gradient memory is offloaded.
            LayoutError: masters or moments are on the host, or of dtypes that no kernel knows.
        """
        if not self._tables or self._must_plan():
            self._tables = {}  # so that a plan which is refused leaves none that looks current
            self._tables = self._plan_tables()
            self._cast = self._plan_cast()
            self._plans += 1
        return self._plans

    def count_step(self) -> None:
        """Count a step that :meth:`plan` has gone before, and copy what it takes from the host."""
        rows = []
        for group in self._optimizer.optimizer.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            rows.append(_hyper_of(group).row())
        # pageable memory of a few bytes is staged at once: nothing is waited for
        self._hyper.copy_(torch.tensor(rows, dtype=torch.float32, device="cpu"), non_blocking=True)

    def launch(self, clips: Tensor) -> None:
        """Step all masters of this rank, and encode what blocks it has whole. Waits for nothing.

        Weights with one scale are cast by :meth:`cast_left_weights`.

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

    def cast_left_weights(self) -> bool:
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

    def take_back(self) -> None:
        """Do not count the last step: it has changed nothing."""
        for group in self._optimizer.optimizer.param_groups:
            group["step"] -= 1

    def make_moments(self) -> None:
        """Make moments of masters that have none, and have all states where they are at home."""
        inner = self._optimizer.optimizer
        for _, master in owned_masters(self._optimizer):
            moments_of(inner, master)
            self._optimizer.host_states.keep(inner, master)

    def _find_moments(self) -> list[Tensor]:
        """Return the tensors that Adam has for moments now."""
        states = self._optimizer.optimizer.state.values()
        try:
            return list(chain.from_iterable(map(_MOMENTS, states)))
        except KeyError:  # of masters that have not stepped
            return [state[name] for state in states for name in MOMENTS if name in state]

    def _have_moments_moved(self) -> bool:
        """Return whether Adam has other moments than were planned with, or has them elsewhere.

        They are not held here: offloading frees what it takes the place of.
        """
        moments = self._find_moments()
        if len(moments) != len(self._moments):
            return True
        are_others = any(map(is_not, moments, map(call, self._moments)))
        return are_others or addresses_of(moments) != self._addresses

    def _must_plan(self) -> bool:
        """Return whether states lie elsewhere, or gathers have been planned anew.

        Plans gathers on the way; where it ends early, :meth:`_plan_tables` asks the other buckets.

        Loading gives Adam other moments, and so do RL stacks that take turns on a GPU: tensors,
        dictionaries of them, or all of its state.
        """
        if self._have_moments_moved() or (self._cast is not None and self._cast.has_moved):
            return True
        return any(
            table.has_moved or (bucket is not None and table.members is not bucket.plan_step())
            for bucket, table in self._tables.items()
        )

    def _plan_tables(self) -> dict[ManagedBucket | None, StepTable]:
        """Return a table for each managed bucket, and one for everything else under None."""
        optimizer = self._optimizer
        inner = optimizer.optimizer
        groups = enumerate(inner.param_groups)
        group_of = {master: number for number, group in groups for master in group["params"]}
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
                    norm=_norm_of(master),
                    weight=weight_of(optimizer, param, master),
                    on_host=optimizer.host_states.on_host(master),
                )
            )
        moments = self._find_moments()
        self._moments = [ref(moment) for moment in moments]
        self._addresses = addresses_of(moments)
        tables = {
            bucket: StepTable.build(
                of_bucket,
                self._hyper,
                self._clips,
                members=None if bucket is None else bucket.plan_step(),
                decoupled=optimizer.config.decoupled_weight_decay,
            )
            for bucket, of_bucket in states.items()
        }
        return {bucket: table.watching(_watched_of(table)) for bucket, table in tables.items()}

    def _plan_cast(self) -> TensorwiseCast | None:
        """Return what casts the weights that Megatron gathers; None if that is left to it, too."""
        optimizer = self._optimizer
        if not optimizer.leaves_weights:
            return None
        weights, masters, starts = optimizer._get_fp8_params_and_shard_fp32_from_fp8()
        return TensorwiseCast(weights, masters, starts) if can_cast(weights) else None


def why_not_fused(optimizer: Any) -> str | None:
    """Return what keeps the fused step from an optimizer that has not stepped yet, or None.

    Args:
        optimizer: any part of a chain.
    """
    config = optimizer.config
    reasons = {
        "Megatron-FSDP": optimizer.ddp_config.use_megatron_fsdp,
        **settings_of_stocks_step(
            config, masters_of_adam=config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        ),
        f"{type(optimizer.optimizer).__name__}, which counts steps by parameter": isinstance(
            optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW
        )
        and not isinstance(optimizer.optimizer, GroupStepAdam),
    }
    return next((reason for reason, there in reasons.items() if there), None)


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


def reduced_over_ranks(of_parts: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the sum over all optimizers and all ranks. Every rank must call it.

    Args:
        of_parts: what this rank has found for each optimizer, of one shape; they may be reduced.
        groups: ranks that share all optimizers, or those that share each of them.
    """
    if len(groups) == 1:
        of_parts = [torch.stack(list(of_parts)).sum(0)]
    for found, group in zip(of_parts, groups, strict=True):
        dist.all_reduce(found, group=group)
    return torch.stack(list(of_parts)).sum(0)


def clip_factors(norms: Tensor, clip_grad: float) -> Tensor:
    """Return what gradients are multiplied by: as Megatron has it, and 1 where nothing is clipped.

    Args:
        norms: [n] fp32.
        clip_grad: the largest norm that stays as it is; 0 clips nothing.
    """
    if clip_grad <= 0.0:
        return torch.ones_like(norms)
    return (clip_grad / (norms + 1.0e-6)).clamp_max_(1.0)


def as_megatron_returns(norm: Tensor) -> Any:
    """Return a norm, fp32 [1], as a tensor where Megatron's own is one, else as a number."""
    return norm if clip_grads.multi_tensor_scale_tensor_impl is not None else norm.item()


def owned_masters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield every parameter of which this rank owns a part, and its master."""
    for params, masters in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for of_params, of_masters in zip(params, masters, strict=True):
            yield from zip(of_params, of_masters, strict=True)


def gradient_of(optimizer: Any, param: Any) -> Tensor:
    """Return what this rank owns of a gradient, where it lies."""
    owned = optimizer._get_model_param_range_map(param)["param"]
    gradient: Tensor = param.main_grad.view(-1)[owned.start : owned.end]
    if not gradient.untyped_storage().size():
        raise StateError(
            "optimizer step: expected gradient memory, got none: it is offloaded. Call "
            "restore_grad_buffers() on the DDP module before optimizer.step()."
        )
    return gradient


def weight_of(optimizer: Any, param: Any, master: Tensor) -> Tensor | None:
    """Return where this rank writes its part of a weight, in the dtype of the weight.

    Returns:
        A view; None where the master lies there, and of quantized weights.
    """
    if is_managed(param) or is_left_to_megatron(param):
        return None
    place = optimizer._get_model_param_range_map(param)["gbuf_world_in_bucket"]
    buffer, _, bucket = optimizer.model_param_gbuf_map[param]
    weights = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
    weight: Tensor = weights[place.start : place.end]
    return None if weight.data_ptr() == master.data_ptr() else weight


def _watched_of(table: StepTable) -> list[Tensor]:
    """Return tensors that tell whether a table has to be built anew, but for its moments.

    Of gradients and weights one of each piece of memory: they are views that nobody else has.
    Masters are the optimizer's own tensors, each with memory that can be exchanged; those that are
    encoded their bucket looks at.
    """
    views = (view for one in table.states for view in (one.gradient, one.weight))
    of_each_memory = {
        view.untyped_storage().data_ptr(): view
        for view in views
        if view is not None and view.numel()
    }
    masters = [one.master for one in table.states] if table.members is None else []
    return [*masters, *of_each_memory.values()]


def _norm_of(master: Tensor) -> int:
    group = _get_param_grad_norm_group(master)
    return NORMS.index(group) if group in NORMS else 0


def _hyper_of(group: dict[str, Any]) -> Hyper:
    return Hyper(
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=group["step"],
        bias_correction=bool(group.get("bias_correction", True)),
    )


def is_too_large(norm: float, threshold: float) -> bool:
    """Return whether a norm is too large for a step to be taken, and say so on one rank."""
    if not (math.isfinite(threshold) and norm > threshold):
        return False
    message = f"moe_optim: step skipped, its gradient norm {norm} is above the threshold"
    log_single_rank(logger, logging.INFO, message)
    return True
