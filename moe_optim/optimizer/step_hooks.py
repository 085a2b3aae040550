"""Step hooks of Adam, and detection of functions that replace its ``step``.

A fused step bypasses ``step``. It calls the hooks as torch does, and refuses to run if ``step`` was
replaced.
"""

from collections.abc import Iterator
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
    """Return whether a torch optimizer has step pre-hooks, global ones included."""
    own = getattr(inner, "_optimizer_step_pre_hooks", None)
    return bool(own or torch_optimizer._global_optimizer_pre_hooks)


def has_hooks(inner: Any) -> bool:
    """Return whether a torch optimizer has step hooks, global ones included."""
    own = getattr(inner, "_optimizer_step_post_hooks", None)
    return bool(own or torch_optimizer._global_optimizer_post_hooks or has_pre_hooks(inner))


@contextmanager
def hooked(inner: Any) -> Iterator[None]:
    """Call step hooks around a block as torch does; refuse pre-hooks that change arguments."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = (inner,), {}
    own = getattr(inner, "_optimizer_step_pre_hooks", {})
    for pre_hook in chain(torch_optimizer._global_optimizer_pre_hooks.values(), own.values()):
        changed = pre_hook(inner, *arguments)
        if changed is not None and changed != arguments:
            raise StateError(
                "optimizer step: expected a step pre-hook to return None, as a fused step takes no "
                f"arguments, got {changed!r:.80}. Change the hook, or set step: stock."
            )
    yield
    own = getattr(inner, "_optimizer_step_post_hooks", {})
    for post_hook in chain(own.values(), torch_optimizer._global_optimizer_post_hooks.values()):
        post_hook(inner, *arguments)


@contextmanager
def showing_gradients(optimizer: Any, clips: Tensor) -> Iterator[Tensor]:
    """Clip gradients in place and expose them as ``grad`` of the masters, for pre-hooks.

    The step uses gradients as modified by pre-hooks. Yields the clip factors that remain to be
    applied: ``clips`` itself, and nothing else happens, without pre-hooks.

    Raises:
        StateError: there are pre-hooks and gradients are not fp32.
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
    """Raise StateError if pre-hooks replaced a ``grad`` of :func:`showing_gradients`."""
    for param, master in owned_masters(optimizer):
        shown = gradient_of(optimizer, param)
        if master.grad is None or master.grad.data_ptr() != shown.data_ptr():
            raise StateError(
                "optimizer step: expected step pre-hooks to change gradients in place, got a "
                "master with another grad, or none. Write into it, or set step: stock."
            )


def require_own_step(inner: Any, built: Any, step: Any) -> None:
    """Raise StateError if an optimizer is not the one that was ``built``, with its own ``step``.

    torch's learning rate schedulers wrap ``step`` to record the call; this records it instead.
    """
    over = vars(inner).get("step")
    if getattr(over, "_wrapped_by_lr_sched", False) and getattr(over, "__wrapped__", None) is step:
        inner._opt_called, over = True, None
    if inner is built and type(inner).step is step and over is None:
        return
    raise StateError(
        f"optimizer step: expected the {type(built).__name__} that was built, with its own step, "
        "got another optimizer or another function in its place, which a fused step does not "
        "call. Use register_step_pre_hook and register_step_post_hook, or set step: stock."
    )
