"""The chain of optimizers: norm, skip decision, update and gather of a step, graphed or not."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS, ChainedOptimizer
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
from megatron.core.utils import log_single_rank
from torch import Tensor

from moe_optim import checkpoint
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError, NonFiniteError, StateError, listed
from moe_optim.integration.agreement import agree, reduce_max
from moe_optim.integration.installation import config_or_bf16, installed_optimizer
from moe_optim.kernels.plan import has_kernels
from moe_optim.optimizer.adam import GroupStepAdam
from moe_optim.optimizer.address_book import NORMS, owned_masters
from moe_optim.optimizer.checkpointed import NOT_SAVED, CheckpointedOptimizer
from moe_optim.optimizer.nonfinite import check_masters, check_states, name_culprits
from moe_optim.optimizer.step_hooks import has_pre_hooks
from moe_optim.places import this_device
from moe_optim.rules import Setup, check_setup, why_stock_step
from moe_optim.weights.partial_loads import (
    expect_agreement,
    replacing,
    require_loaded_everywhere,
    watch_loads,
)
from moe_optim.weights.steps import count_step

if TYPE_CHECKING:
    from moe_optim.health.monitor import HealthMonitor

logger = logging.getLogger(__name__)
_NORM_NAMES = ("gradient norm", *(f"gradient norm of {group}" for group in NORMS[1:]))


class StepObserver(Protocol):
    """Observer of all steps of a chain; see ``GroupedChainedOptimizer.observers``."""

    def before_step(self) -> None:
        """Observe masters and weights before the step changes them. Every rank calls it."""

    def before_save(self) -> None:
        """Report pending results, since a run may end with this save. Every rank calls it."""


class GroupedChainedOptimizer(ChainedOptimizer):
    """Megatron's chain of optimizers, which checks the gradient norm before it updates any weight.

    Norms are reduced over all ranks, so all ranks make the same decision. A healthy step needs no
    extra collective, except for separate norm groups when clipping is off.
    """

    chained_optimizers: list[Any]
    health: "HealthMonitor | None" = None
    """Samples of expert health; None with ``health_interval: 0``."""

    def __init__(self, chained_optimizers: list[Any]) -> None:
        """Same arguments as Megatron's class. Every rank must call it.

        Raises:
            ConfigError: ``step: fused`` is set, but some rank cannot run it.
        """
        super().__init__(chained_optimizers)
        watch_loads(self.model_chunks)
        self._agreed_loads = 0
        config = config_or_bf16()
        self.policy = config.nonfinite
        self.is_fused = self._agree_to_fuse(config)
        self._must_skip = False
        self.observers: list[StepObserver] = []
        """Observers in call order, the same on every rank."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace Megatron's CUDA graph wrapper of ``step``, which would capture host decisions."""
        if name == "step" and isinstance(value, OptimizerCudaGraphWrapper):
            value = GraphedStep(self)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Report the last step of a dropped graph: a save follows. Every rank must call it."""
        graphed = self._graphed_step if name == "step" else None
        super().__delattr__(name)
        if graphed:
            graphed.tell()

    @torch.no_grad()
    def step(self) -> Any:
        """Return whether weights moved, the gradient norm and the zero count, on every rank.

        Every rank must call it; raises as :meth:`get_grad_norm`. StateError if a load has failed
        after it replaced a part of weights or states.
        """
        self.begin_step()
        return self._step_fused() if self.is_fused else super().step()

    def begin_step(self) -> None:
        """Refuse what a failed load has left, and call the observers. Every rank must call it."""
        self._agreed_loads = require_loaded_everywhere(self._tensors, self._agreed_loads)
        count_step(self.model_chunks)
        for observer in self.observers:
            observer.before_step()

    def _tensors(self) -> Iterator[Tensor]:
        """Yield weights, masters and moments."""
        yield from self._masters()
        for part in self.stepping:
            for chunk in getattr(part, "model_chunks", ()):
                yield from chunk.parameters()
            for states in part.optimizer.state.values():
                yield from (value for value in states.values() if isinstance(value, Tensor))

    def _masters(self) -> Iterator[Tensor]:
        for part in self.stepping:
            for group in part.optimizer.param_groups:
                yield from group["params"]

    def _agree_to_fuse(self, config: MoEOptimConfig) -> bool:
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
        """Optimizers with parameters; frozen models and other pipeline stages have none."""
        return [part for part in self.chained_optimizers if not part.is_stub_optimizer]

    def _step_fused(self) -> Any:
        with self._timed("optimizer-clip-main-grad"):
            norms, (norm, *of_groups), zeros = self.find_norms()
        clipped = self.clipped_norms()
        self.grad_norms_by_group = {
            group: found
            for group, found, is_clipped in zip(NORMS[1:], of_groups, clipped[1:], strict=True)
            if is_clipped
        }
        self._check_norms(dict(zip(_NORM_NAMES, [norm, *of_groups], strict=True)))
        is_too_large = not self._must_skip and norm > self.largest_norm
        if is_too_large:
            message = f"moe_optim: step skipped, its gradient norm {norm} is above the threshold"
            log_single_rank(logger, logging.INFO, message)
        moves = not (self._must_skip or is_too_large)
        if moves:
            for part in self.stepping:  # parts after a failed one are not stepped
                clips = clip_factors(norms, part.config.clip_grad, clipped)
                with self._timed("optimizer-inner-step"):
                    part.update_masters(clips)
                with self._timed("params-all-gather"):
                    part.start_gathers(after_update=True)
        counted = zeros if self.config.log_num_zeros_in_grad else None
        return moves, as_megatron_returns(norms[:1]), counted

    @property
    def largest_norm(self) -> float:
        """Gradient norm above which a step is skipped; Inf without a threshold."""
        return min([part.config.grad_norm_skip_threshold for part in self.chained_optimizers])

    def clipped_norms(self) -> list[bool]:
        """Return one flag per norm: whether Megatron clips by it. Every rank must call it.

        Megatron searches for separate norm groups once, at the first step that clips.
        """
        clips = any([part.config.clip_grad > 0.0 for part in self.chained_optimizers])
        return [True, *[clips and self.has_grad_norm_group(str(group)) for group in NORMS[1:]]]

    def find_norms(self) -> tuple[Tensor, list[float], int]:
        """Return norms on the device, [len(NORMS)] fp32, the same on the host, and the zero count.

        Every rank must call it. This is the only host synchronization of a step.
        """
        parts = self.stepping
        for part in parts:
            part.read_gradients()
        total = self.sum_squares()
        norms = norms_of(total[:-1], self.config)
        for part in parts:
            if not has_pre_hooks(part.optimizer):  # pre-hooks may move planned tensors
                part.plan_update()  # overlaps with the norm on the device
        *of_host, zeros = torch.cat([norms, total[-1:]]).tolist()
        return norms, of_host, int(zeros)

    def sum_squares(self) -> Tensor:
        """Return squared norms and zero count over all ranks, [len(NORMS) + 1] fp64.

        Every rank must call it. Does not synchronize with the device.
        """
        parts = self.chained_optimizers
        mine = [
            torch.zeros(len(NORMS) + 1, dtype=torch.float64, device=this_device())
            if part.is_stub_optimizer
            else part.sum_squares()
            for part in parts
        ]
        if self.grads_states_parallel_group_is_shared():
            mine, groups = [torch.stack(mine).sum(0)], [self.get_grad_stats_parallel_group()]
        else:
            groups = [part.get_grad_stats_parallel_group() for part in parts]
        for found, group in zip(mine, groups, strict=True):
            dist.all_reduce(found, group=group)
        return torch.stack(mine).sum(0)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timers = self.config.timers
        if timers is None:
            yield
            return
        timers(name, log_level=1).start(barrier=self.config.barrier_with_L1_time)
        yield
        timers(name).stop()

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Copy and unscale gradients; return whether any is non-finite. Every rank must call it.

        With a loss scale, Megatron checks for Inf and NaN here. Only a dynamic loss scale excuses
        them, since it provokes overflow and then lowers itself.
        """
        found = bool(super().prepare_grads())
        scalers = [getattr(part, "grad_scaler", None) for part in self.chained_optimizers]
        if found and not any(isinstance(scaler, DynamicGradScaler) for scaler in scalers):
            self._refuse("scaled gradients are not finite")
        return found

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Return the norm over all gradients of all ranks. Every rank must call it.

        Also checks the norms of separate groups, which Megatron does not compute without clipping.

        Raises:
            NonFiniteError: a norm is Inf or NaN and the policy is ``raise``; the message names
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
        bad = [f"{what} is {float(of)}" for what, of in norms.items() if not math.isfinite(of)]
        self._must_skip = bool(bad)
        if bad:
            self._refuse(", ".join(bad))

    def _refuse(self, found: str) -> None:
        message = f"{found}. {name_culprits(self)}"
        if self.policy == "raise":
            raise NonFiniteError(
                f"optimizer step: {message}. No weight has moved. Lower the learning rate, "
                "inspect the batch, or set nonfinite: skip to drop such steps."
            )
        logger.warning("optimizer step skipped: %s", message)

    def step_with_ready_grads(self) -> bool:
        """Step, unless the policy skips this step."""
        return False if self._must_skip else super().step_with_ready_grads()

    def _step(self) -> bool:
        """Step all optimizers, each of which starts the gathers that belong into a step.

        Megatron starts those of the first chunk's experts before their optimizer has stepped.
        """
        return all([part.step_with_ready_grads() for part in self.chained_optimizers])

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state to save, or shapes to load into. Every rank must call it.

        Raises:
            LayoutError: states by name would be saved twice, or not at all; on every rank.
            NonFiniteError: a master or moment to be saved is Inf or NaN, on every rank, and
                ``save_nonfinite`` is not set; or the last step of a CUDA graph found non-finite
                gradients.
        """
        collect = partial(super().sharded_state_dict, *args, **kwargs)
        # the first collective, which a rank joins that cannot save its model
        agree(self._hear_of_last_step, None)
        if kwargs.get("is_loading", len(args) > 1 and args[1]):
            expect_agreement()
            with self._without_stubs():
                return agree(collect, None)
        keys, metadata = checkpoint.state_manifest, kwargs.get("metadata") or {}
        is_by_name = metadata.get(keys.SHARDING_TYPE) == keys.BY_NAME
        if is_by_name:
            agree(self._require_tilings, None)
        agree(self._check_states, None)  # before collectives that reach beyond a culprit's group
        with self._without_stubs():
            state = agree(collect, None)
        return checkpoint.param_groups.as_layer_wise(state) if is_by_name else state

    def save_parameter_state(self, filename: str) -> None:
        """Save masters and moments of ``--ckpt-format torch``. Every rank must call it.

        Raises:
            NonFiniteError: a master or moment is Inf or NaN, on every rank, and ``save_nonfinite``
                is not set.
        """
        agree(self._check_states, None)  # other stages would wait for a culprit's group
        with self._without_stubs():
            super().save_parameter_state(filename)

    def _check_states(self) -> None:
        parts = [part for part in self.stepping if isinstance(part, CheckpointedOptimizer)]
        check_states([one for one in parts if not one.moe_optim_config.save_nonfinite], NOT_SAVED)

    def _require_tilings(self) -> None:
        find = checkpoint.owned_boxes.find_tiling_faults
        faults = [fault for part in self.stepping for fault in find(part)]
        if faults:
            raise LayoutError(
                "optimizer.sharded_state_dict: expected data-parallel ranks to own every element "
                f"of a parameter once, got {listed(faults, '; ')}. Nothing has been saved: "
                "Megatron lays shards out differently from what moe_optim was built for; run "
                "`moe-optim doctor`, or save without --dist-ckpt-optim-fully-reshardable."
            )

    def state_dict(self) -> Any:
        """Return groups with step counts. Every rank must call it; raises as the above."""
        self._hear_of_last_step()
        with self._without_stubs():
            return super().state_dict()

    @contextmanager
    def _without_stubs(self) -> Iterator[None]:
        """Leave out optimizers without parameters, which Megatron can neither save nor load."""
        parts = self.chained_optimizers
        self.chained_optimizers = self.stepping
        try:
            yield
        finally:
            self.chained_optimizers = parts

    def _hear_of_last_step(self) -> None:
        # a run may end with this save
        for observer in self.observers:
            observer.before_save()
        if graphed := self._graphed_step:
            graphed.tell()

    @property
    def _graphed_step(self) -> "GraphedStep | None":
        step = vars(self).get("step")
        return step if isinstance(step, GraphedStep) else None

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the states of one or several optimizers. Every rank must call it.

        An error of one rank is raised on all. Steps and saves then refuse weights and states, which
        the checkpoint has replaced in part, until another load ends.

        Raises:
            LayoutError: another optimizer saved them, or a parameter group has no counterpart.
            NonFiniteError: a master of a quantized weight is Inf or NaN.
        """
        loaded: list[Any] = []  # groups alone replace no states
        with replacing(
            self._tensors,
            "optimizer states",
            is_whole=lambda: len(loaded) == len(self.stepping),
        ):
            expect_agreement()
            states, are_scattered = agree(partial(self._states_by_part, state_dict), None)
            if reduce_max([are_scattered], None) != [0]:
                # groups alone first: a rank that fails must not leave others waiting to scatter
                groups = {part: {**state} for part, state in states.items()}
                for state in groups.values():
                    state.pop("param_state", None)
                self._load_each(lambda part: part.load_states(groups[part]))
            self._load_each(lambda part: part.load_states(states[part]))
            agree(self._synchronize_steps if len(states) > 1 else lambda: None, None)
            loaded += [part for part, state in states.items() if "param_state" in state]
            self._gather_loaded(loaded)
        if graphed := self._graphed_step:
            graphed.forget()

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Derive masters from the weights, or from a model state dict, then weights from masters.

        Every rank must call it. An error of one rank is raised on all, and steps and saves then
        refuse masters that were replaced in part, until another load or reload ends.

        Raises:
            LayoutError: a parameter is missing, duplicated or misshapen in ``state_dict``.
            NonFiniteError: a master of a quantized weight is Inf or NaN.
            StateError: weights are offloaded; no master is replaced.
        """
        has_begun = False

        def derive(part: Any) -> None:
            nonlocal has_begun
            before, has_begun = has_begun, True
            try:
                part.derive_masters(states[part])
            except LayoutError:  # of the state dict, which is compared before anything is written
                has_begun = before
                raise

        with replacing(self._masters, "reload_model_params", has_begun=lambda: has_begun):
            expect_agreement()
            split = agree(partial(self._split_state_dict, state_dict), None)
            states = dict(zip(self.chained_optimizers, split, strict=True))
            agree(self._require_weights, None)
            self._load_each(derive)
            self._gather_loaded(self.stepping)

    def _require_weights(self) -> None:
        for part in self.stepping:
            part.require_weights("reload_model_params()")

    def _states_by_part(self, states: Any) -> tuple[dict[Any, Any], bool]:
        """Return the states of each optimizer, and whether ranks scatter any."""
        parts = self.stepping
        if isinstance(states, dict):
            is_muon = installed_optimizer() == "muon"
            states = checkpoint.param_groups.states_by_part(states, parts, is_muon=is_muon)
            is_one = len(parts) == 1
            states = [states] if is_one else [state for _, state in sorted(states.items())]
        if len(states) != len(parts):
            raise LayoutError(
                f"optimizer.load_state_dict: expected states of {len(parts)} optimizers, got "
                f"{len(states)}. Load with the parallel sizes that they were saved with."
            )
        kinds = {state.get("param_state_sharding_type") for state in states}
        return dict(zip(parts, states, strict=True)), "dp_zero_gather_scatter" in kinds

    def _load_each(self, load: Callable[[Any], None]) -> None:
        """Call ``load`` for every optimizer, one after the other on all ranks.

        They communicate in different groups: a rank that fails must not go on to the next.
        """
        parts = self.chained_optimizers
        for number in range(reduce_max([len(parts)], None)[0]):
            has_states = number < len(parts) and not parts[number].is_stub_optimizer
            agree(partial(load, parts[number]) if has_states else lambda: None, None)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Load masters and moments of ``--ckpt-format torch``; as :meth:`load_state_dict`."""
        with replacing(self._tensors, filename):
            expect_agreement()
            states = agree(partial(self._read_parameter_state, filename), None)
            self._load_each(
                lambda part: part.load_parameter_state_from_dp_zero(
                    states.get(part), update_legacy_format=update_legacy_format
                )
            )
            self._gather_loaded(self.stepping)

    def _read_parameter_state(self, filename: str) -> dict[Any, Any]:
        """Return the states of the optimizers in whose groups this rank is the first."""
        parts = self.stepping
        if all(part.data_parallel_group.rank() != 0 for part in parts):
            return {}
        read = torch.load(filename)
        states = read if len(parts) > 1 else [read]
        are_states = isinstance(states, list) and all(
            isinstance(one, dict | None) for one in states
        )
        if not are_states or len(states) != len(parts):
            got = f"a list of {len(read)}" if isinstance(read, list) else f"a {type(read).__name__}"
            raise LayoutError(
                f"{filename}: expected states of {len(parts)} optimizers, as --ckpt-format torch "
                f"saves them, got {got}. Load with the parallel sizes that they were saved with, "
                "or give --no-load-optim."
            )
        return dict(zip(parts, states, strict=True))

    def _gather_loaded(self, parts: Sequence[Any]) -> None:
        agree(partial(check_masters, parts), None)
        for part in parts:
            part.gather_weights()


class GraphedStep:
    """The fused step of a :class:`GroupedChainedOptimizer`, captured on its second run.

    The norm stays on the device; if it is non-finite or too large, negative clip factors turn the
    update into a no-op. The host learns of it when the next step begins or a checkpoint is saved.
    Learning rates and step counts are copied before each replay, and weights are gathered after it,
    as without a graph.
    """

    def __init__(self, chain: Any) -> None:
        self._chain = chain
        device = this_device()
        self._captures = device.type == "cuda"
        self._norms = torch.zeros(len(NORMS), dtype=torch.float32, device=device)
        self._total = torch.zeros(len(NORMS) + 1, dtype=torch.float64, device=device)
        self._on_host = torch.zeros(
            len(NORMS), dtype=torch.float32, device="cpu", pin_memory=self._captures
        )
        self._is_there: torch.cuda.Event | None = None
        self._is_told = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._plans: list[float] | None = None  # at the last step
        self._largest_norm, self._clipped = math.inf, [True] * len(NORMS)

    @torch.no_grad()
    def __call__(self) -> Any:
        """Step once, and return the result of Megatron's step. Every rank must call it.

        Raises:
            NonFiniteError: the previous step found non-finite gradients; neither step changed
                anything.
            StateError: Adam has step pre-hooks, which require clipped gradients, or a load has
                failed after it replaced a part of weights or states.
        """
        self.tell()
        self._chain.begin_step()
        parts = self._chain.stepping
        for part in parts:
            if has_pre_hooks(part.optimizer):
                raise StateError(
                    "--optimizer-cuda-graph: expected no step pre-hooks of the optimizer, as "
                    "gradients are clipped inside of the graph, got some. Remove them, or drop the "
                    "flag."
                )
            part.read_gradients()
        # outside of the graph: NCCL requires that all ranks replay a collective or none, but each
        # rank rebuilds its plans when its own memory moves
        self._total.copy_(self._chain.sum_squares())
        self._largest_norm = self._chain.largest_norm
        self._clipped = self._chain.clipped_norms()
        read_when_captured = [self._largest_norm, *self._clipped]
        read_when_captured += [part.config.clip_grad for part in parts]
        plans = [part.plan_update() for part in parts]
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.updating())
                stack.enter_context(part.hooks())
                stack.enter_context(part.counting())
            self._launch([*plans, *read_when_captured])
        self._is_told = False
        if self._captures:
            self._is_there = torch.cuda.Event()
            self._is_there.record()
        for part in parts:
            part.start_gathers(after_update=True)
        counts = self._chain.config.log_num_zeros_in_grad
        return True, as_megatron_returns(self._norms[:1]), self._total[-1:] if counts else None

    def tell(self) -> None:
        """Report the outcome of the last step, once. Every rank must call it.

        Raises:
            NonFiniteError: gradients were non-finite, and the policy is ``raise``.
        """
        if self._is_told:
            return
        self._is_told = True
        if self._is_there is not None:
            self._is_there.synchronize()  # waits for the last step, not for later work
        norm, *of_groups = self._on_host.tolist()
        is_finite = all(map(math.isfinite, (norm, *of_groups)))
        if is_finite and norm <= self._largest_norm:
            return
        for part in self._chain.stepping:
            part.count_steps(-1)
        if is_finite:
            message = (
                f"moe_optim: last step skipped, its gradient norm {norm} is above the threshold"
            )
            log_single_rank(logger, logging.INFO, message)
            return
        message = f"last optimizer step: gradient norms were {[norm, *of_groups]}"
        if self._chain.policy == "raise":
            raise NonFiniteError(
                f"{message}. No weight has moved. Train without --optimizer-cuda-graph to have the "
                "parameters named, or set nonfinite: skip to drop such steps."
            )
        logger.warning("%s; it was skipped", message)

    def forget(self) -> None:
        """Drop the outcome of the last step, after a load of other states and step counts."""
        self._is_told = True

    def _launch(self, plans: list[float]) -> None:
        """Run the kernels: eagerly after a change of ``plans``, else as a graph."""
        if not self._captures or plans != self._plans:
            self._plans, self._graph = plans, None
            self._run_kernels()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            stream = get_shared_capture_stream()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._run_kernels()
            log_single_rank(logger, logging.INFO, "moe_optim: the step is a CUDA graph from now on")
        self._graph.replay()

    def _run_kernels(self) -> None:
        norms = norms_of(self._total[:-1], self._chain.config)
        moves = norms.isfinite().all() & (norms[0] <= self._largest_norm)
        for part in self._chain.stepping:
            factors = clip_factors(norms, part.config.clip_grad, self._clipped)
            part.launch(torch.where(moves, factors, -1.0))
        self._norms.copy_(norms)
        self._on_host.copy_(norms, non_blocking=True)


# Norms and clipping


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

_FUSED = (GroupStepAdam.__name__, "FusedAdam", "Muon")
"""Classes whose steps fused ones compute; the second is Transformer Engine's, or apex's."""


def setup_of(optimizer: Any, config: MoEOptimConfig) -> Setup:
    """Return the settings that decide whether steps of a part of a chain are fused."""
    inner = type(optimizer.optimizer)
    defining = inner.step.__qualname__.partition(".")[0]  # torch's hooks keep the name
    setup = Setup(
        config=config,
        optimizer=optimizer.config,
        ddp=optimizer.ddp_config,
        masters_of_adam=optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
        adam=None if defining in _FUSED else inner.__name__,
    )
    if why_stock_step(setup):  # there may be no masters
        return setup
    return replace(setup, has_kernels=runs_on_kernels(optimizer))


def runs_on_kernels(optimizer: Any) -> bool:
    """Return whether kernels can update every master of an optimizer."""
    return all(has_kernels(master.device) for _, master in owned_masters(optimizer))
