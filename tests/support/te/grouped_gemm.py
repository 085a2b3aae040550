"""What Transformer Engine 2.20.2 does around the GEMMs of a grouped linear, in plain torch.

As ``module/grouped_linear.py`` has it: weights are found again by weak references, their gradients
go into ``main_grad`` where accumulation is fused, or wait for ``backward_dw``.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.calibration.fake_quantization import PerExpertGrid
from moe_optim.formats import BlockScaledFormat
from moe_optim.formats.reference.fake import fake_quantize, fake_quantize_blocks


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


def by_hand(
    weights: list[Tensor],
    format: BlockScaledFormat | PerExpertGrid,
    *,
    fuses: bool,
    amax: Tensor | None = None,
    group: Any = None,
) -> list[Tensor]:
    """Return what weights are in ``format``, quantized one by one, with their attributes.

    Calibrated amaxes, one or one an expert, clip gradients; every other gradient passes to its
    weight. With ``fuses``, GEMMs have added it to ``main_grad``. ``group`` has the other parts of
    each expert.
    """
    found = []
    amaxes = [None] * len(weights) if amax is None else amax.flatten().expand(len(weights))
    for weight, own in zip(weights, amaxes, strict=True):
        if isinstance(format, PerExpertGrid):
            limit = weight.detach().abs().max() if own is None else own
            if own is None and group is not None and group.size() > 1:
                dist.all_reduce(limit, dist.ReduceOp.MAX, group=group)
            values = fake_quantize(weight.detach(), limit, format.bits)
        else:
            values, own = fake_quantize_blocks(weight[None], format)[0], None
        handed: Any = _ByHand.apply(weight, values, fuses, own)
        vars(handed).update(vars(weight))
        found.append(handed)
    return found


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, values: Tensor, fuses: bool, amax: Tensor | None
    ) -> Tensor:
        ctx.weight, ctx.fuses, ctx.amax = weight, fuses, amax
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.fuses and hasattr(ctx.weight, "grad_added_to_main_grad"):
            ctx.weight.grad_added_to_main_grad = True
        if ctx.amax is not None:
            grad = torch.where(ctx.weight.float().abs() <= ctx.amax, grad, 0)
        return grad, None, None, None
