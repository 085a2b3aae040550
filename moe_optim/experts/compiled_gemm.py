"""The grouped GEMM in compiled graphs, as custom operators that run eagerly.

A graph holds the handle of a linear, whose operand is read at every run, so weights that are stale
or were written between forward and backward raise as in eager mode. Weight gradients are returned
through autograd, since an operator may not write memory that the compiler does not see; DDP's hooks
add them to ``main_grad`` with bit-identical results.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moe_optim import library
from moe_optim.errors import StateError
from moe_optim.experts.grouped_gemm import Linear, WgradFactors, require_same_version
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.traced import object_of


def multiply(tokens: Tensor, ends: Tensor, linear: Linear) -> Tensor:
    """Multiply each expert's tokens by its weight in a compiled graph; refuse ``delay_wgrad``."""
    if linear.delay_wgrad:
        raise StateError(
            f"{linear.name}: delayed weight gradients are not kept in compiled graphs. Compile "
            "without delay_wgrad_compute and overlap_dispatch_backward_with_experts_wgrad."
        )
    output, _ = _grouped_product(tokens, ends, linear.weights(), linear.handle)
    return output


def _empty_output(
    tokens: Tensor, ends: Tensor, weights: list[Tensor], handle: Tensor
) -> tuple[Tensor, Tensor]:
    rows, cols = weights[0].shape[-2], tokens.shape[1]
    operand = tokens.new_empty((ends.shape[0], rows, cols))
    entries = 1 if weights[0].dtype == torch.uint8 else 2  # uint8 weights are quantized buffers
    version = handle.new_empty(len(weights) * entries)
    return grouped_mm(tokens, operand.transpose(1, 2), offs=ends), version


@partial(library.operation, fake=_empty_output)
def _grouped_product(
    tokens: Tensor, ends: Tensor, weights: list[Tensor], handle: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [T, R], and the version of the weights, int64 on the host.

    ``weights`` are bf16 parameters, or one buffer per quantized parameter. They declare the
    dependencies to autograd and the compiler; the linear itself reads the weights.
    """
    linear: Linear = object_of(handle)
    linear.call_pre_hooks()
    _require_own(linear, weights)
    output = grouped_mm(tokens, linear.operand("rowwise").transpose(1, 2), offs=ends)
    return output, torch.tensor(linear.version(), dtype=torch.int64, device="cpu")


def _empty_dgrad(
    output_grad: Tensor, ends: Tensor, handle: Tensor, version: Tensor, cols: int
) -> Tensor:
    operand = output_grad.new_empty((ends.shape[0], output_grad.shape[1], cols))
    return grouped_mm(output_grad, operand, offs=ends)


@partial(library.operation, fake=_empty_dgrad)
def _grouped_dgrad(
    output_grad: Tensor, ends: Tensor, handle: Tensor, version: Tensor, cols: int
) -> Tensor:
    linear: Linear = object_of(handle)
    require_same_version(linear, tuple(version.tolist()))
    return grouped_mm(output_grad, linear.operand("columnwise"), offs=ends)


@partial(
    library.operation,
    fake=lambda grad, tokens, ends, *_: WgradFactors(grad, tokens, ends, ()).multiply(),
)
def _grouped_wgrad(
    output_grad: Tensor, tokens: Tensor, ends: Tensor, handle: Tensor, version: Tensor
) -> Tensor:
    linear: Linear = object_of(handle)
    factors = WgradFactors(output_grad, tokens, ends, tuple(version.tolist()))
    require_same_version(linear, factors.version)
    for weight in linear.weights():
        if getattr(weight, "grad_added_to_main_grad", False):  # set by an eager pass
            weight.grad_added_to_main_grad = False
    return linear.clip_wgrad(factors.multiply())


def _require_own(linear: Linear, weights: Sequence[Tensor]) -> None:
    """Raise StateError if a graph replaced bf16 weights, which the linear would not see."""
    for weight, own in zip(weights, linear.weights(), strict=True):
        if weight.dtype == own.dtype and weight.data_ptr() != own.data_ptr():
            raise StateError(
                f"{linear.name}: expected the parameters themselves, got other tensors. Write "
                "weights outside of the compiled function."
            )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, ends, weights, handle = inputs
    ctx.save_for_backward(tokens, ends, handle, output[1])
    ctx.weight_count, ctx.are_apart = len(weights), weights[0].dim() == 2
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, output_grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    tokens, ends, handle, version = ctx.saved_tensors
    wants_tokens, _, wants_weights, _ = ctx.needs_input_grad
    output_grad = output_grad.contiguous()
    tokens_grad, weight_grads = None, [None] * ctx.weight_count
    if wants_tokens:
        tokens_grad = _grouped_dgrad(output_grad, ends, handle, version, tokens.shape[1])
    if any(wants_weights):
        wgrad = _grouped_wgrad(output_grad, tokens, ends, handle, version)
        parts = wgrad.unbind(0) if ctx.are_apart else [wgrad]
        pairs = zip(parts, wants_weights, strict=True)
        weight_grads = [part if wanted else None for part, wanted in pairs]
    return tokens_grad, None, weight_grads, None


_grouped_product.register_autograd(_differentiate, setup_context=_keep)


def _read_buffers(_cls: Any, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
    """Pass one buffer per quantized weight to the operator, in place of values it does not read."""
    tokens, ends, weights, handle = args
    buffers = [
        w.quantized_storage.laid_out.rowwise_data if isinstance(w, GroupedWeight) else w
        for w in weights
    ]
    return func(tokens, ends, buffers, handle, **kwargs)


_grouped_product.register_torch_dispatch(GroupedWeight, _read_buffers)
