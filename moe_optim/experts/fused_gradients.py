"""Gradients that GEMMs have added to ``main_grad``, beside those of other uses of a weight."""

from typing import Any

import torch
from torch import Tensor

from moe_optim.weights.grouped_weight import GradientNote


class FusedNote(GradientNote):
    """Gradient hook of a weight whose GEMMs add its gradient to ``main_grad``.

    Autograd requires a gradient of the GEMM nonetheless, and adds those of other uses to it, such
    as of a penalty in the loss. It gets :attr:`zeros`, without memory of their own. If anything
    else arrives, the hook clears ``grad_added_to_main_grad``, so that DDP's hooks add that, too.
    """

    def __init__(self, weight: Any, like: Tensor) -> None:
        """Hook ``weight``, whose gradients have shape, dtype and device of ``like``."""
        super().__init__(weight)
        self.zeros = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)

    @classmethod
    def of(cls, weight: Any, like: Tensor) -> "FusedNote":
        """Return the hook of ``weight``, registered before its gradient is accumulated."""
        for hook in (weight._backward_hooks or {}).values():
            if isinstance(hook, FusedNote):
                if hook.zeros.device != like.device:
                    hook.zeros = cls(weight, like).zeros
                return hook
        note = cls(weight, like)
        weight.register_hook(note)
        return note

    def __call__(self, gradient: Tensor) -> Tensor | None:  # type: ignore[override]
        """Return uninitialized memory in place of zeros, which DDP's hooks free unread."""
        if gradient is self.zeros:
            return torch.empty_like(gradient, memory_format=torch.contiguous_format)
        self._weight.grad_added_to_main_grad = False
        return None
