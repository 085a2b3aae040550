"""Gradients of quantized copies become those of the weights, zero where the copy clips one.

Transformer Engine returns weight gradients through autograd, adds them to ``main_grad``, or delays
them until ``backward_dw``. Each way has its place to clip, before Megatron counts a gradient as
ready to be reduced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optim.calibration.fake_operations import clipped_gradient, cut_like, zero_clipped
from moe_optim.experts.fused_gradients import FusedNote
from moe_optim.kernels.plan import Backend


def share_attributes(copies: Sequence[Any], weights: Sequence[Any], *, fuses: bool) -> None:
    """Let GEMMs read and set the attributes of weights on their copies, such as ``main_grad``.

    Transformer Engine computes all gradients of a linear or none. Those of frozen weights go into
    memory that nothing reads, if the GEMMs add gradients to ``main_grad`` (``fuses``).
    """
    for copy, weight in zip(copies, weights, strict=True):
        weight._do_not_offload = True  # with activations, as Megatron does with parameters
        copy.__dict__ = vars(weight)
    frozen = [place for place, weight in enumerate(weights) if not weight.requires_grad]
    trained: Any = next((one for one in weights if one.requires_grad), None)
    if fuses and frozen and hasattr(trained, "main_grad"):
        unread = torch.empty_like(trained.main_grad)
        for place in frozen:
            copies[place].__dict__ = vars(weights[place]) | {"main_grad": unread}


class StraightThrough(torch.autograd.Function):
    """Views of a copy, whose gradients are those of the weights.

    Any number of backward passes may run through one node, so it keeps tensors as attributes.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, linear: Any, amax: Tensor | None, backend: Backend, *weights: Any
    ) -> tuple[Tensor, ...]:
        """Return the ``values`` [E, R, C] of each expert; ``amax`` is [E], [1], or clips nothing.

        ``linear`` is Transformer Engine's, ``weights`` are its parameters.
        """
        ctx.set_materialize_grads(False)
        ctx.weights, ctx.amax, ctx.backend = weights, amax, backend
        ctx.fuses, ctx.delays = linear.fuse_wgrad_accumulation, linear.need_backward_dw()
        return values.unbind(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pass gradients to the weights, after Transformer Engine's own backward pass."""
        passed: Sequence[Tensor | None] = gradients
        if ctx.fuses and not ctx.delays:
            if ctx.amax is not None:
                _zero_main_grads(ctx.weights, ctx.amax, ctx.backend)
            passed = [_beside_fused(*one) for one in zip(ctx.weights, gradients, strict=True)]
        elif ctx.amax is not None and not ctx.delays:
            passed = _clip(ctx.weights, ctx.amax, gradients, ctx.backend)
        return None, None, None, None, *passed


def _beside_fused(weight: Any, gradient: Tensor | None) -> Tensor | None:
    """Return zeros for the uninitialized memory that stands for a gradient in ``main_grad``.

    Autograd adds gradients of other uses of the weight to it. Delayed gradients stay as they are:
    until they arrive, ``grad`` holds this memory.
    """
    is_added = getattr(weight, "grad_added_to_main_grad", False)
    if gradient is None or not is_added or not weight.requires_grad:
        return gradient
    return FusedNote.of(weight, gradient).zeros


def clip_delayed(
    linear: Any, weights: Sequence[Any], amax: Tensor | None, backend: Backend
) -> None:
    """Clip the gradients that ``backward_dw`` has stored, and take those of frozen weights back.

    ``linear`` is Transformer Engine's, ``weights`` are its parameters, and ``amax`` is [E], [1], or
    None, which clips nothing.
    """
    for weight in weights:
        if not weight.requires_grad:
            weight.grad = None
    if amax is None:
        return
    if linear.fuse_wgrad_accumulation:
        _zero_main_grads(weights, amax, backend)
    else:
        _zero(weights, amax, [weight.grad for weight in weights], backend)


def _zero_main_grads(weights: Sequence[Any], amax: Tensor, backend: Backend) -> None:
    """Zero the ``main_grad`` of trained weights in place where ``amax`` clips the weight.

    It may hold the sum of several microbatches: weights and amaxes change between steps, so the
    gradients of earlier ones are zero there already.
    """
    kept = [getattr(w, "main_grad", None) if w.requires_grad else None for w in weights]
    _zero(weights, amax, kept, backend)


def _zero(
    weights: Sequence[Tensor], amax: Tensor, gradients: Sequence[Tensor | None], backend: Backend
) -> None:
    values, amax, present = _present(weights, amax, gradients)
    if present:
        zero_clipped(values, amax, present, backend)


def _clip(
    weights: Sequence[Tensor], amax: Tensor, gradients: Sequence[Tensor | None], backend: Backend
) -> Sequence[Tensor | None]:
    """Return the clipped gradients, None where there are none, in memory of their own."""
    values, amax, present = _present(weights, amax, gradients)
    if not present:
        return gradients
    whole = clipped_gradient(values, amax, [one.contiguous() for one in present], backend)
    clipped = iter(cut_like(whole, present))
    return [None if gradient is None else next(clipped) for gradient in gradients]


def _present(
    weights: Sequence[Tensor], amax: Tensor, gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if amax.numel() > 1 and 0 < len(places) < len(weights):
        amax = torch.cat([amax[place : place + 1] for place in places])
    present = [gradient for gradient in gradients if gradient is not None]
    return [weights[place].detach() for place in places], amax, present
