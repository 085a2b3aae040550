"""Adam for machines without Transformer Engine and apex, with the state Megatron expects of theirs.

``torch.optim.AdamW`` keeps ``step`` as a tensor in the state of every parameter. Megatron's
distributed optimizer, which was written for the fused optimizers of Transformer Engine and apex,
then fails or goes wrong in three places: ``state_dict`` asserts on an empty state,
``load_state_dict`` hands the same step tensor to every parameter (N parameters advance it N times
a step), and checkpoints treat it as one more tensor of parameter shape. Keeping ``step`` where the
fused optimizers keep it, in the parameter group, mends all three.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam

HAVE_APEX_OR_TE = True
"""What ``distrib_optimizer`` has to believe so that it looks for ``step`` in the group."""
USING_APEX_OPTIMIZER = True
USING_PYTORCH_OPTIMIZER = False


class GroupStepAdam(torch.optim.AdamW):
    """torch's Adam or AdamW, with ``step`` (an int) in the parameter group as apex's FusedAdam has.

    Args:
        params: parameters or parameter groups.
        adam_w_mode: decoupled weight decay (AdamW) if true, L2 regularisation (Adam) if false.
        **defaults: as for ``torch.optim.AdamW``.
    """

    def __init__(self, params: Any, adam_w_mode: bool = True, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        self.defaults["adam_w_mode"] = adam_w_mode
        for group in self.param_groups:
            group.setdefault("adam_w_mode", adam_w_mode)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state as they are; torch's Adam looks for ``step`` in the state."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient; the arithmetic is torch's own."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        # torch counts the step up by itself, on a tensor of its own
        steps = [torch.tensor(float(group["step"] - 1)) for _ in params]
        beta1, beta2 = group["betas"]
        adam(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            steps,
            foreach=group["foreach"],
            capturable=False,
            differentiable=False,
            fused=None,
            decoupled_weight_decay=group["adam_w_mode"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
