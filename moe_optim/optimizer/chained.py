"""The chain of optimizers: norm, decision, update, gather, and whose gradients are not finite."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS, ChainedOptimizer
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
from torch import Tensor

from moe_optim.checkpoint.param_groups import states_by_part
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import NonFiniteError
from moe_optim.experts.module import first_experts
from moe_optim.health.monitor import HealthMonitor
from moe_optim.integration.installation import config_or_bf16
from moe_optim.optimizer.adam import MOMENTS
from moe_optim.optimizer.fused import nothing_found, setup_of
from moe_optim.optimizer.graphed import GraphedStep
from moe_optim.optimizer.norms import (
    NORMS,
    as_megatron_returns,
    clip_factors,
    is_too_large,
    norms_of,
    reduced_over_ranks,
)
from moe_optim.optimizer.owned import gradient_of, owned_masters
from moe_optim.optimizer.step_hooks import has_pre_hooks
from moe_optim.rules import Setup, check_setup, why_stock_step
from moe_optim.weights.names import global_parameter_names

logger = logging.getLogger(__name__)
MOST_NAMED = 8
"""Culprits a rank names; with a NaN loss every gradient is one."""


class GroupedChainedOptimizer(ChainedOptimizer):
    """Megatron's chain of optimizers, which looks at the gradient norm before anything moves.

    Norms are reduced over all ranks already, so they all decide alike. No collective is added to a
    healthy step, but for norms of groups of their own where nothing is clipped. Clipping, moments,
    masters and weights come after the decision.
    """

    def __init__(self, chained_optimizers: list[Any]) -> None:
        """Arguments are Megatron's. Every rank must call it.

        Raises:
            ConfigError: ``step: fused`` is set, and something keeps it from running on some rank.
        """
        super().__init__(chained_optimizers)
        config = config_or_bf16()
        self.policy = config.nonfinite
        self.is_fused = self._agree_to_fuse(config)
        self._must_skip = False
        self.health = HealthMonitor(self, config.health_interval, config.backend)

    def __setattr__(self, name: str, value: Any) -> None:
        """Take a graph of our own where a training loop puts Megatron's in the place of ``step``.

        Megatron's would capture what is decided on the host, and tell no bucket of its replays.
        """
        if name == "step" and isinstance(value, OptimizerCudaGraphWrapper):
            value = GraphedStep(self)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Hear of the last step where a training loop drops its graph: it saves once more after it.

        Every rank must call it.

        Raises:
            NonFiniteError: the last step has found gradients that are not finite.
        """
        graphed = self._graphed_step if name == "step" else None
        super().__delattr__(name)
        if graphed:
            graphed.tell()

    @torch.no_grad()
    def step(self) -> Any:
        """Step once; return whether weights moved, the gradient norm, and zeros if any are counted.

        Every rank must call it.

        Raises:
            NonFiniteError: as :meth:`get_grad_norm`.
        """
        self.health.before_step()
        return self._step_fused() if self.is_fused else super().step()

    def _agree_to_fuse(self, config: MoEOptimConfig) -> bool:
        """Return whether steps are fused, on all ranks alike. Every rank must call it."""
        setups = [setup_of(part, config) for part in self.stepping]
        setup = next(
            filter(why_stock_step, setups),
            Setup(config=config, optimizer=self.config, masters_of_adam=False),
        )
        reason = why_stock_step(setup)
        device = torch.cuda.current_device()
        everywhere = torch.tensor(reason is None, dtype=torch.int32, device=device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if not everywhere:
            reason = reason or "an optimizer of another rank that cannot be fused"
        self.stock_reason = reason
        if config.step == "fused":
            check_setup(replace(setup, stock_reason=reason), "moe_optim")
        return reason is None

    @property
    def stepping(self) -> list[Any]:
        """The optimizers that have something to step, which frozen models and other stages lack."""
        return [part for part in self.chained_optimizers if not part.is_stub_optimizer]

    def _step_fused(self) -> Any:
        """Do what Megatron's step does, for all parts at once where that makes a difference."""
        with self._timed("optimizer-clip-main-grad"):
            norms, (norm, *of_groups), zeros = self.find_norms()
        clipped = self.clipped_norms()
        self.grad_norms_by_group = {
            group: found
            for group, found, is_clipped in zip(NORMS[1:], of_groups, clipped[1:], strict=True)
            if is_clipped
        }
        what = ["gradient norm", *(f"gradient norm of {group}" for group in NORMS[1:])]
        self._check_norms(dict(zip(what, [norm, *of_groups], strict=True)))
        moves = not (self._must_skip or is_too_large(norm, self.largest_norm))
        if moves:
            for part in self.stepping:  # one whose turn comes after a failure is left alone
                clips = clip_factors(norms, part.config.clip_grad, clipped)
                with self._timed("optimizer-inner-step"):
                    part.update_masters(clips)
                with self._timed("params-all-gather"):
                    part.gather_unless_overlapped()
        counted = zeros if self.config.log_num_zeros_in_grad else None
        return moves, as_megatron_returns(norms[:1]), counted

    @property
    def largest_norm(self) -> float:
        """The gradient norm above which no step is taken; Inf without such a threshold."""
        return min(part.config.grad_norm_skip_threshold for part in self.chained_optimizers)

    def clipped_norms(self) -> list[bool]:
        """Return of each norm whether Megatron clips by it, if it clips at all.

        It looks for parameters of a group of their own at the first step that clips, and never
        again. Every rank must call it.
        """
        clips = any(part.config.clip_grad > 0.0 for part in self.chained_optimizers)
        return [True, *(clips and self.has_grad_norm_group(str(group)) for group in NORMS[1:])]

    def find_norms(self) -> tuple[Tensor, list[float], int]:
        """Return the norms of all gradients, [len(NORMS)] fp32, those on the host, and the zeros.

        Every rank must call it; the host waits for the device here, and nowhere else in a step.
        """
        for part in self.stepping:
            part.read_gradients()
        total = self.sum_squares()
        norms = norms_of(total[:-1], self.config)
        for part in self.stepping:
            if not has_pre_hooks(part.optimizer):  # which may move what is planned with
                part.plan_update()  # before the wait: the device finds the norm meanwhile
        *of_host, zeros = torch.cat([norms, total[-1:]]).tolist()
        return norms, of_host, int(zeros)

    def sum_squares(self) -> Tensor:
        """Return squared norms and zeros over all optimizers and ranks, [len(NORMS) + 1] fp64.

        Every rank must call it. Nothing is waited for.
        """
        parts = self.chained_optimizers
        mine = [nothing_found() if p.is_stub_optimizer else p.update.sum_squares() for p in parts]
        shared = self.grads_states_parallel_group_is_shared()
        return reduced_over_ranks(
            mine,
            [self.get_grad_stats_parallel_group()]
            if shared
            else [part.get_grad_stats_parallel_group() for part in parts],
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Count the time under one of Megatron's timers, if there are any."""
        timers = self.config.timers
        if timers is None:
            yield
            return
        timers(name, log_level=1).start(barrier=self.config.barrier_with_L1_time)
        yield
        timers(name).stop()

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Copy and unscale gradients; return whether some are not finite. Every rank must call it.

        Megatron looks for Inf and NaN here where there is a loss scale. One that adapts provokes
        them, and lowers itself; with one that stays as it is they are what they are without.

        Raises:
            NonFiniteError: as :meth:`get_grad_norm`.
        """
        found = bool(super().prepare_grads())
        scalers = [getattr(part, "grad_scaler", None) for part in self.chained_optimizers]
        if found and not any(isinstance(scaler, DynamicGradScaler) for scaler in scalers):
            self._refuse("scaled gradients are not finite")
        return found

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Return the norm over all gradients of all ranks. Every rank must call it.

        Groups of parameters whose norm Megatron keeps apart are looked at, too, also where nothing
        is clipped and it does not compute theirs.

        Raises:
            NonFiniteError: one is Inf or NaN and the policy is ``raise``; the message names
                parameter, expert and owner rank of each culprit.
        """
        norm = super().get_grad_norm()
        norms = {"gradient norm": norm} | {
            f"gradient norm of {group}": self._get_grad_norm_for_group(group)
            for group in SEPARATE_GRAD_NORM_GROUPS
            if self.has_grad_norm_group(group)
        }
        self._check_norms(norms)
        return norm

    def _check_norms(self, norms: Mapping[str, Any]) -> None:
        """Raise, or note that this step is skipped, if a norm is not finite. All ranks call it."""
        bad = [f"{what} is {float(of)}" for what, of in norms.items() if not math.isfinite(of)]
        self._must_skip = bool(bad)
        if bad:
            self._refuse(", ".join(bad))

    def _refuse(self, found: str) -> None:
        """Raise or warn, as the policy says. Every rank must call it."""
        message = f"{found}. {self._culprits()}"
        if self.policy == "raise":
            raise NonFiniteError(
                f"optimizer step: {message}. No weight has moved. Lower the learning rate, "
                "inspect the batch, or set nonfinite: skip to drop such steps."
            )
        logger.warning("optimizer step skipped: %s", message)

    def step_with_ready_grads(self) -> bool:
        """Step, unless the policy says to skip this one."""
        return False if self._must_skip else super().step_with_ready_grads()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is saved, or shapes to load into. Every rank must call it.

        Raises:
            NonFiniteError: the last step of a CUDA graph has found gradients that are not finite.
        """
        self._hear_of_last_step()
        return super().sharded_state_dict(*args, **kwargs)

    def state_dict(self) -> Any:
        """Return groups, step counts included. Every rank must call it; raises as the above."""
        self._hear_of_last_step()
        return super().state_dict()

    def _hear_of_last_step(self) -> None:
        """Say what is known by now, as a run may end with this save."""
        self.health.tell()
        if graphed := self._graphed_step:
            graphed.tell()

    @property
    def _graphed_step(self) -> GraphedStep | None:
        step = vars(self).get("step")
        return step if isinstance(step, GraphedStep) else None

    def load_state_dict(self, state_dict: Any) -> None:
        """Load states of one optimizer or of several, whatever there are here."""
        if isinstance(state_dict, dict):
            state_dict = states_by_part(state_dict, self.chained_optimizers)
        super().load_state_dict(state_dict)
        if graphed := self._graphed_step:
            graphed.forget()

    def _culprits(self) -> str:
        """Name non-finite gradients of all ranks. Every rank must call it."""
        rank, found = dist.get_rank(), list(self._find_culprits())
        lines = [f"rank {rank}: {line}" for line in found[:MOST_NAMED]]
        if len(found) > MOST_NAMED:
            lines.append(f"rank {rank}: and {len(found) - MOST_NAMED} more")
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, lines)
        named = "; ".join(line for of_rank in gathered for line in of_rank)
        return named or "No square of a gradient is Inf in fp32, but the sum of all is"

    def _find_culprits(self) -> Iterator[str]:
        non_finite = describer(self.model_chunks, "non-finite gradient")
        too_large = describer(self.model_chunks, "finite gradient", "whose square is Inf in fp32")
        for part in self.stepping:
            for param, _ in owned_masters(part):
                start = part._get_model_param_range_map(param)["param"].start
                gradient = gradient_of(part, param).float()
                bad = ~gradient.isfinite()
                overflow = ~(bad | gradient.square().isfinite())
                for describe, of in ((non_finite, bad), (too_large, overflow)):
                    if bool(of.any()):
                        yield describe(param, of.nonzero().view(-1) + start)


def check_masters(
    optimizer: Any,
    remedy: str,
    only: Callable[[Tensor], bool] = lambda _: True,
    *,
    with_moments: bool = False,
) -> None:
    """Raise NonFiniteError if a master is Inf or NaN, on any rank of the data-parallel group.

    Every rank must call it.

    Args:
        optimizer: a distributed optimizer.
        remedy: what has not happened, and what to do.
        only: says of a parameter whether its master is looked at.
        with_moments: whether its moments are, too.
    """
    found: list[str] = []
    kinds = ("master", *MOMENTS) if with_moments else ("master",)
    describers = {kind: describer(optimizer.model_chunks, f"non-finite {kind}") for kind in kinds}
    for param, master in owned_masters(optimizer):
        if master is None or not only(param):
            continue
        start = optimizer._get_model_param_range_map(param)["param"].start
        states = {"master": master, **optimizer.optimizer.state.get(master, {})}
        for kind in (kind for kind in kinds if kind in states):
            bad = (~states[kind].float().isfinite()).nonzero().view(-1) + start
            if len(bad):
                found.append(describers[kind](param, bad))
    group = optimizer.data_parallel_group
    everywhere: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everywhere, found[:MOST_NAMED], group=group)
    lines = [
        f"data-parallel rank {rank}: {line}"
        for rank, of_rank in enumerate(everywhere)
        for line in of_rank
    ]
    if lines:
        what = "masters and moments" if with_moments else "masters"
        raise NonFiniteError(f"{what}: expected finite values, got {'; '.join(lines)}. {remedy}")


def describer(
    model_chunks: Sequence[torch.nn.Module], kind: str, more: str = ""
) -> Callable[[torch.nn.Parameter, Tensor], str]:
    """Return what says which parameter, which of its experts, and how many elements are of a kind.

    It takes the parameter and the places [n] of elements in it, at least one.

    Args:
        model_chunks: that own the parameters.
        kind: what the elements are, in the singular.
        more: what is said of them besides.
    """
    names, first_of = global_parameter_names(model_chunks), first_experts(model_chunks)

    def describe(param: torch.nn.Parameter, bad: Tensor) -> str:
        count = f"{len(bad)} {kind}{'s' if len(bad) > 1 else ''} {more}".rstrip()
        if param not in first_of:
            return f"{names[param]}: {count}"
        per_expert = math.prod(param.shape[-2:])
        experts = sorted({int(first_of[param] + index) for index in (bad // per_expert).tolist()})
        return f"{names[param]}, expert {', '.join(map(str, experts))}: {count}"

    return describe
