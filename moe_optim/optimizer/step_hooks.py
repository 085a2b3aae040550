"""What stands around ``step`` of the Adam that Megatron was given: hooks, and functions over it.

A fused step takes the place of that function. Hooks it calls as torch does; another function in its
place it cannot call, and refuses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from moe_optim.errors import StateError
from moe_optim.optimizer.address_book import (
    flat_masters,
    flat_params,
    gradient_of,
    norm_of,
    owned_masters,
)


def has_pre_hooks(inner: Any) -> bool:
    """Return whether something is called before each step of an optimizer of torch."""
    return bool(torch_optimizer._global_optimizer_pre_hooks or _hooks(inner, "pre"))


def has_hooks(inner: Any) -> bool:
    """Return whether something is called before or after each step of an optimizer of torch."""
    of_all = torch_optimizer._global_optimizer_post_hooks
    return bool(has_pre_hooks(inner) or of_all or _hooks(inner, "post"))


@contextmanager
def hooked(inner: Any) -> Iterator[None]:
    """Call the hooks of an optimizer around a block, in torch's order and with its arguments.

    Raises:
        StateError: a hook gives ``step`` other arguments, which a fused step does not take.
    """
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = (inner,), {}
    before = torch_optimizer._global_optimizer_pre_hooks.values()
    for pre_hook in chain(before, _hooks(inner, "pre").values()):
        changed = pre_hook(inner, *arguments)
        if changed is not None and changed != arguments:
            raise StateError(
                "optimizer step: expected a step pre-hook to return None, as a fused step takes no "
                f"arguments, got {changed!r:.80}. Change the hook, or set step: stock."
            )
    yield
    after = torch_optimizer._global_optimizer_post_hooks.values()
    for post_hook in chain(_hooks(inner, "post").values(), after):
        post_hook(inner, *arguments)


def _hooks(inner: Any, when: str) -> dict[int, Callable[..., Any]]:
    found: dict[int, Callable[..., Any]] = getattr(inner, f"_optimizer_step_{when}_hooks", {})
    return found


@contextmanager
def showing_gradients(optimizer: Any, clips: Tensor) -> Iterator[Tensor]:
    """Give each master its gradient as ``grad`` in a block, clipped, if hooks are to see it.

    They are those of the parameters, where they lie: what pre-hooks change of them is stepped.

    Args:
        optimizer: a ``GroupedDistributedOptimizer``.
        clips: [len(NORMS)] fp32 on the device: what gradients are multiplied by.

    Returns:
        What gradients are still to be multiplied by.

    Raises:
        StateError: pre-hooks are to see gradients that are not in fp32.
    """
    if not has_pre_hooks(optimizer.optimizer):
        yield clips
        return
    masters = flat_masters(optimizer)
    gradients = [gradient_of(optimizer, param) for param in flat_params(optimizer)]
    if others := {gradient.dtype for gradient in gradients} - {torch.float32}:
        raise StateError(
            "optimizer step: expected gradients in fp32 for step pre-hooks, which may change "
            f"them, got {others.pop()}. Remove the hooks, reduce gradients in fp32, or set "
            "step: stock."
        )
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient.mul_(clips[norm_of(master)])
    try:
        yield torch.ones_like(clips)
    finally:
        for master in masters:
            master.grad = None


def require_shown(optimizer: Any) -> None:
    """Check that pre-hooks have left ``grad`` where :func:`showing_gradients` has put it.

    Args:
        optimizer: a ``GroupedDistributedOptimizer``.

    Raises:
        StateError: they have not.
    """
    for param, master in owned_masters(optimizer):
        shown = gradient_of(optimizer, param)
        if master.grad is None or master.grad.data_ptr() != shown.data_ptr():
            raise StateError(
                "optimizer step: expected step pre-hooks to change gradients in place, got a "
                "master with another grad, or none. Write into it, or set step: stock."
            )


class OwnStep:
    """The function that is ``step`` of an optimizer when this is made.

    Args:
        inner: Adam, as Megatron was given it; None of an optimizer that has nothing to step.
    """

    def __init__(self, inner: Any) -> None:
        self._inner, self._function = inner, getattr(type(inner), "step", None)

    def require(self, inner: Any) -> None:
        """Check that the function has not been replaced since, and is covered by no other.

        A learning rate scheduler of torch covers it with one that notes the call, as this does.

        Raises:
            StateError: it was, or is.
        """
        over = vars(inner).get("step")
        if getattr(over, "_wrapped_by_lr_sched", False) and (
            getattr(over, "__wrapped__", None) is self._function
        ):
            inner._opt_called, over = True, None
        if inner is self._inner and type(inner).step is self._function and over is None:
            return
        raise StateError(
            f"optimizer step: expected the {type(self._inner).__name__} that was built, with its "
            "own step, got another optimizer or another function in its place, which a fused step "
            "does not call. Use register_step_pre_hook and register_step_post_hook, or set "
            "step: stock."
        )
