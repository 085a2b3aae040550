"""What Transformer Engine 2.20.2 does around the GEMMs of a grouped linear, in plain torch.

As ``module/grouped_linear.py`` has it: weights are found again by weak references, their gradients
go into ``main_grad`` where accumulation is fused, or wait for ``backward_dw``.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GroupedGemm(torch.autograd.Function):
    """Tokens of each expert times its weight, one autograd function for all."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        splits: list[int],
        fuses: bool,
        delayed: list[Callable[[], list[Tensor]]] | None,
        *weights: Tensor,
    ) -> Tensor:
        """Return [T, R]; ``delayed`` collects weight gradients to compute later."""
        ctx.save_for_backward(tokens, *weights)
        ctx.splits, ctx.delayed = splits, delayed
        ctx.fuses = fuses and weights[0].requires_grad
        ctx.needs_wgrad = weights[0].requires_grad
        if ctx.fuses:
            ctx.origins = [weakref.ref(weight) for weight in weights]
            ctx.main_grads = [lambda at=at: weights[at].main_grad for at in range(len(weights))]
        parts = zip(tokens.split(splits), weights, strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tokens, *weights = ctx.saved_tensors
        grads = grad.contiguous().split(ctx.splits)
        dgrad = torch.cat([one @ weight for one, weight in zip(grads, weights, strict=True)])
        if not ctx.needs_wgrad:
            return dgrad, None, None, None, *(None for _ in weights)
        origins = [ref() for ref in ctx.origins] if ctx.fuses else []
        assert None not in origins, "weight was removed while fuse_wgrad_accumulation=True"
        main_grads = [get() for get in ctx.main_grads] if ctx.fuses else []
        outputs = main_grads or [torch.full_like(weight, torch.nan) for weight in weights]

        def compute() -> list[Tensor]:
            for part, one, out in zip(tokens.split(ctx.splits), grads, outputs, strict=True):
                wgrad = (part.t() @ one).t()
                out.add_(wgrad) if ctx.fuses else out.copy_(wgrad)
            return outputs

        if ctx.delayed is None:
            compute()
        else:
            ctx.delayed.append(compute)
        returned = [_dummy(origin) for origin in origins] if ctx.fuses else outputs
        return dgrad, None, None, None, *returned


def _dummy(weight: Tensor) -> Tensor | None:
    """Mark the gradient as added, and return what nobody may add again."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full(weight.main_grad.shape, torch.nan, dtype=weight.dtype)


class ByHand(torch.autograd.Function):
    """Given values in place of a weight, whose gradient passes: what copies are compared with."""

    @staticmethod
    def forward(_ctx: Any, _weight: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
