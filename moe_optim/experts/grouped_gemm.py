"""The grouped GEMM of all experts in autograd, with immediate or delayed weight gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from moe_optim.errors import StateError

Version = tuple[int, ...]  # version of weights; changes whenever one is written or replaced


class GradientEnd(Enum):
    """Destination of a weight's gradient in the current backward pass."""

    LEAF = "accumulated, and seen by hooks"
    CALLER = "returned by torch.autograd.grad"
    NOWHERE = "of a frozen weight, or not among the inputs of this pass"


Linear = Any  # a GroupedLinear, whose module imports this one


@dataclass(frozen=True)
class WgradFactors:
    """Factors of the weight gradient of one GEMM.

    ``output_grad`` [T, R] and ``tokens`` [T, C] are bf16, ``ends`` [E] int32 the end of each
    expert's tokens, and ``version`` is that of the weights in the forward pass.
    """

    output_grad: Tensor
    tokens: Tensor
    ends: Tensor
    version: Version

    def multiply(self) -> Tensor:
        """Return the weight gradient, [E, R, C] bf16."""
        return grouped_mm(self.output_grad.t(), self.tokens, offs=self.ends)


def require_same_version(linear: Linear, version: Version) -> None:
    """Raise StateError if weights have changed since the forward pass."""
    if linear.version() != version:
        raise StateError(
            f"{linear.name}.weight: the weights were rewritten between forward and "
            "backward. Finish the backward passes of a step before the optimizer steps."
        )


def multiply(tokens: Tensor, ends: Tensor, linear: Linear) -> Tensor:
    """Multiply each expert's tokens by its weight; see :meth:`GroupedLinear.forward`.

    With delayed weight gradients the graph does not include the weights, so hooks that count their
    gradients do not run before :func:`run_delayed_wgrad`.
    """
    weights: Sequence[Tensor] = linear.weights()
    if linear.delay_wgrad:  # a leaf in their place requires a backward pass even without a dgrad
        needed = any(weight.requires_grad for weight in weights)
        weights = [tokens.new_empty(0).requires_grad_(needed)]
    return _GroupedGemm.apply(tokens, ends, linear, *weights)


def run_delayed_wgrad(linear: Linear, factors: WgradFactors) -> None:
    """Compute a weight gradient and pass it to autograd, which runs all hooks of the weights."""
    with torch.enable_grad():  # off in a backward pass, from which Megatron also calls this
        done = _DelayedWgrad.apply(linear, factors, *linear.weights())
    if done.requires_grad:  # false if all weights were frozen since
        done.backward()


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, linear: Linear, *_: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends)
        ctx.linear = linear
        ctx.version = linear.version()
        return grouped_mm(tokens, linear.operand("rowwise").transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends = ctx.saved_tensors
        linear: Linear = ctx.linear
        (output_grad,) = output_grads
        if not len(tokens):  # an empty expanded tensor counts as contiguous, but GEMMs refuse it
            output_grad = output_grad.new_empty(output_grad.shape)
        output_grad = output_grad.contiguous()
        require_same_version(linear, ctx.version)
        tokens_grad = None
        if ctx.needs_input_grad[0]:
            tokens_grad = grouped_mm(output_grad, linear.operand("columnwise"), offs=ends)
        gradient_ends = _gradient_ends(ctx, first=3)
        weight_grads: Sequence[Tensor | None] = [None] * len(gradient_ends)
        if any(end is not GradientEnd.NOWHERE for end in gradient_ends):
            factors = WgradFactors(output_grad, tokens, ends, ctx.version)
            if linear.delay_wgrad:
                linear.keep_for_wgrad(factors)
            else:
                weight_grads = linear.take_wgrad(factors.multiply(), gradient_ends)
        return tokens_grad, None, None, *weight_grads


class _DelayedWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: Linear, factors: WgradFactors, *_: Tensor) -> Tensor:
        ctx.linear, ctx.factors = linear, factors
        return factors.tokens.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient_ends = _gradient_ends(ctx, first=2)
        return None, None, *ctx.linear.take_wgrad(ctx.factors.multiply(), gradient_ends)


def _gradient_ends(ctx: Any, first: int) -> list[GradientEnd]:
    """Return the destinations of the gradients of the inputs from ``first`` on.

    ``needs_input_grad`` ignores passes that request the gradients of some inputs only.
    """
    needed = ctx.needs_input_grad[first:]
    nodes = ctx.next_functions[-len(needed) :]  # of tensors only; weights come last
    return [
        _gradient_end(node) if is_needed else GradientEnd.NOWHERE
        for is_needed, (node, _) in zip(needed, nodes, strict=True)
    ]


def _gradient_end(node: Any) -> GradientEnd:
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for leaves whose gradient is returned
        return GradientEnd.CALLER
    return GradientEnd.LEAF if runs else GradientEnd.NOWHERE
