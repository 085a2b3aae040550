"""A fused step replayed as a CUDA graph, from gradients to encoded weights.

The norm stays on the device; if it is non-finite or too large, negative clip factors turn the
update into a no-op. The host learns of it when the next step begins or a checkpoint is saved.
Learning rates and step counts are copied before each replay, and weights are gathered after it, as
without a graph.
"""

import logging
import math
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.utils import log_single_rank

from moe_optim.errors import NonFiniteError, StateError
from moe_optim.optimizer.address_book import NORMS
from moe_optim.optimizer.step import as_megatron_returns, clip_factors, norms_of, this_device
from moe_optim.optimizer.step_hooks import has_pre_hooks

logger = logging.getLogger(__name__)


class GraphedStep:
    """The fused step of a ``GroupedChainedOptimizer``, captured on its second run."""

    def __init__(self, chain: Any) -> None:
        self._chain = chain
        device = this_device()
        self._captures = device.type == "cuda"
        self._norms = torch.zeros(len(NORMS), dtype=torch.float32, device=device)
        self._zeros = torch.zeros(1, dtype=torch.float64, device=device)
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
            StateError: Adam has step pre-hooks, which require clipped gradients.
        """
        self.tell()
        self._chain.before_step()
        parts = self._chain.stepping
        for part in parts:
            _refuse_pre_hooks(part.optimizer)
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
                part.read_hyper()
                stack.enter_context(part.counting())
            self._launch([*plans, *read_when_captured])
        self._is_told = False
        if self._captures:
            self._is_there = torch.cuda.Event()
            self._is_there.record()
        for part in parts:
            part.gather_unless_overlapped()
        counts = self._chain.config.log_num_zeros_in_grad
        return True, as_megatron_returns(self._norms[:1]), self._zeros if counts else None

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
            part.take_back()
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
        total = self._total
        norms = norms_of(total[:-1], self._chain.config)
        moves = norms.isfinite().all() & (norms[0] <= self._largest_norm)
        for part in self._chain.stepping:
            factors = clip_factors(norms, part.config.clip_grad, self._clipped)
            part.launch(torch.where(moves, factors, -1.0))
        self._norms.copy_(norms)
        self._zeros.copy_(total[-1:])
        self._on_host.copy_(norms, non_blocking=True)


def _refuse_pre_hooks(inner: Any) -> None:
    if has_pre_hooks(inner):
        raise StateError(
            "--optimizer-cuda-graph: expected no step pre-hooks of the optimizer, as gradients are "
            "clipped inside of the graph, got some. Remove them, or drop the flag."
        )
