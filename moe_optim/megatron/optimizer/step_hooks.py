"""What stands around ``step`` of the Adam that Megatron was given: hooks, and functions over it.

A fused step takes the place of that function. Hooks it calls as torch does; another function in its
place it cannot call, and refuses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch.optim import optimizer as torch_optimizer

from moe_optim.errors import StateError


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
