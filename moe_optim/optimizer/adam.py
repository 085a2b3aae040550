"""Adam for machines without Transformer Engine and apex, with the state layout Megatron expects.

``step`` is in the parameter group, as in the fused optimizers of Transformer Engine and apex. With
a ``step`` tensor per parameter, as in ``torch.optim.AdamW``, Megatron's ``state_dict`` asserts on
an empty state, and its ``load_state_dict`` shares one tensor among all parameters. Moments support
the storage dtypes of Transformer Engine's FusedAdam; arithmetic is fp32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor
from torch.optim.adam import adam

from moe_optim.errors import ConfigError
from moe_optim.integration.engine import original

MOMENTS = ("exp_avg", "exp_avg_sq")
_HELD_AS = {torch.uint8: torch.float8_e4m3fn}  # "fp8" of Megatron's flags
_LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, torch.float8_e4m3fn: 448.0}
"""Value that the largest magnitude of a moment is scaled to, as in FusedAdam of Transformer Engine
(pytorch/optimizers/fused_adam.py); bf16 has the range of fp32 and is not scaled."""

HAVE_APEX_OR_TE = True
"""Makes Megatron's ``distrib_optimizer`` read ``step`` from the group."""
USING_APEX_OPTIMIZER = True
USING_PYTORCH_OPTIMIZER = False


class GroupStepAdam(torch.optim.AdamW):
    """torch's Adam or AdamW, with ``step`` (an int) in the parameter group as in apex's FusedAdam.

    Args:
        params: parameters or parameter groups.
        adam_w_mode: decoupled weight decay (AdamW) if true, L2 regularization (Adam) if false.
        exp_avg_dtype: storage dtype of the first moment: fp32, bf16, fp16 or uint8 (E4M3); None
            stores and computes it in the parameter's dtype.
        exp_avg_sq_dtype: storage dtype of the second moment.
        **defaults: arguments of ``torch.optim.AdamW``, without ``amsgrad`` and ``maximize``.

    Raises:
        ConfigError: an argument, or an entry of a group, is not supported.
    """

    def __init__(
        self,
        params: Any,
        *,
        adam_w_mode: bool = True,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        if "master_weights" in defaults:
            raise ConfigError(
                "--use-precision-aware-optimizer: expected quantized weights, whose masters "
                "Megatron keeps, got others, whose masters Transformer Engine's Adam keeps. Set "
                "--moe-optim-set step=fused with masters in fp32, remove the flag, or install "
                "Transformer Engine."
            )
        super().__init__(params, **defaults)
        require_descent(self)
        self._dtypes = dict(zip(MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype), strict=True))
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        self.defaults["adam_w_mode"] = adam_w_mode
        for group in self.param_groups:
            group.setdefault("adam_w_mode", adam_w_mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dtypes": self._dtypes, "_scales": self._scales}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state; torch's Adam expects ``step`` in the state."""
        torch.optim.Optimizer.__setstate__(self, state)
        require_descent(self)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient, with torch's arithmetic."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        require_descent(self)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.initialize_state(p)
        moments = {name: [self.get_unscaled_state(p, name) for p in params] for name in MOMENTS}
        # torch increments its own step tensor
        steps = [torch.tensor(group["step"] - 1, dtype=torch.float32, device="cpu") for _ in params]
        beta1, beta2 = group["betas"]
        adam(
            params,
            [p.grad for p in params],
            moments["exp_avg"],
            moments["exp_avg_sq"],
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
        for name, values in moments.items():
            for p, value in zip(params, values, strict=True):
                if value is not self.state[p][name]:
                    self.set_scaled_state(p, name, value)

    def initialize_state(self, param: Tensor) -> None:
        """Create zero moments for a parameter."""
        for name, dtype in self._dtypes.items():
            held = param.dtype if dtype is None else _HELD_AS.get(dtype, dtype)
            self.state[param][name] = torch.zeros_like(param, dtype=held)
            self._scales.setdefault(param, {})[name] = torch.ones(
                1, dtype=torch.float32, device=param.device
            )

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Return a moment in the compute dtype: the tensor itself, or an unscaled fp32 copy."""
        state: Tensor = self.state[param][name]
        if self._dtypes[name] is None:
            return state
        if state.dtype in _LARGEST:
            return state.float().mul_(self._scales[param][name])
        return state.float()

    def set_scaled_state(self, param: Tensor, name: str, values: Tensor) -> None:
        """Store a moment, given in the compute dtype, in its storage dtype."""
        if not self.state[param]:
            self.initialize_state(param)
        state = self.state[param][name]
        if self._dtypes[name] is not None and state.dtype in _LARGEST:
            largest = values.abs().amax() if values.numel() else values.new_zeros(())
            scale = largest / _LARGEST[state.dtype]
            self._scales[param][name].copy_(scale)
            values = values.float() * torch.where(scale > 0, scale.reciprocal(), 0.0)
        state.copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states, with unscaled moments."""
        found = super().state_dict()
        for number, param in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in found["state"]:
                found["state"][number] = {
                    name: self.get_unscaled_state(param, name) for name in MOMENTS
                }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and states; moments may have any floating-point dtype.

        Moments that this optimizer holds already, as Megatron gives them, stay where they are.
        """
        held = {param: dict(state) for param, state in self.state.items()}
        super().load_state_dict({**state_dict, "state": {}})
        for number, param in enumerate(p for group in self.param_groups for p in group["params"]):
            for name, values in state_dict["state"].get(number, {}).items():
                if values is held.get(param, {}).get(name):
                    self.state[param][name] = values
                else:
                    self.set_scaled_state(param, name, values)


def require_descent(inner: Any) -> None:
    """Raise ConfigError if a parameter group asks for another update than Adam's or AdamW's."""
    for group in inner.param_groups:
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise ConfigError(
                    f"optimizer: parameter groups: {name}: expected False, as Megatron's Adam has "
                    f"no such setting, got {group[name]}. Leave it out."
                )


def moments_of(inner: Any, master: Tensor) -> tuple[Tensor, Tensor]:
    """Return both moments of a master, not copies; creates zeros before the first step."""
    state = inner.state[master]
    if MOMENTS[0] not in state:
        if isinstance(inner, GroupStepAdam):
            inner.initialize_state(master)
        elif hasattr(inner, "initialize_state"):  # Transformer Engine's Adam
            inner.initialize_state(master, False)
        else:
            state.update({name: torch.zeros_like(master.detach()) for name in MOMENTS})
    exp_avg, exp_avg_sq = (inner.state[master][name] for name in MOMENTS)
    return exp_avg, exp_avg_sq


@contextmanager
def keeping_moments(inner: Any) -> Iterator[None]:
    """Keep existing moments where they are while Megatron loads groups.

    Megatron loads the optimizer's own states into it again. Transformer Engine's Adam then copies
    all of them, 8 bytes per fp32 parameter, and narrow ones in fp32.
    """
    masters = (master for group in inner.param_groups for master in group["params"])
    if isinstance(inner, HybridDeviceOptimizer) or not all(map(inner.state.get, masters)):
        yield
        return
    load = inner.load_state_dict

    def load_groups(state_dict: dict[str, Any]) -> None:
        states = inner.state
        load({**state_dict, "state": {}})
        inner.state = states

    own = {name: vars(inner).get(name) for name in ("load_state_dict", "state_dict")}
    inner.load_state_dict = load_groups
    inner.state_dict = partial(torch.optim.Optimizer.state_dict, inner)
    try:
        yield
    finally:
        for name, method in own.items():
            delattr(inner, name) if method is None else setattr(inner, name, method)


def check_optimizer_config(self: Any) -> None:
    """Check an ``OptimizerConfig`` as Megatron does, but do not require Transformer Engine's Adam.

    Megatron requires it for ``use_precision_aware_optimizer``, in its last check.
    """
    try:
        original("megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__")(self)
    except RuntimeError:
        if not self.use_precision_aware_optimizer:
            raise
