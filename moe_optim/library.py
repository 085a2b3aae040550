"""Opaque operations for compiled graphs, whose bodies run eagerly.

``torch.compile`` may reorder and fuse operations, which changes last bits, and it can neither read
values nor call a bucket. An operation, in namespace ``moe_optim``, is one graph node: the compiler
sees only shapes and dtypes of its results and calls the body at every run, with eager results and
all checks.

Operations return new tensors and do not mutate their arguments. Those that check something are
excluded from CUDA graphs, whose replays would skip the checks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

NAMESPACE = "moe_optim"


def operation(
    body: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    schema: str = "",
    name: str = "",
    replays: bool = False,
) -> Any:
    """Register ``body`` as an operation without a gradient.

    ``body`` takes tensors and constants, typed by annotations, and returns tensors that share no
    memory with them. ``fake`` takes the same and returns results of the right shapes, dtypes and
    strides. ``schema`` gives arguments and results if annotations do not suffice, ``name`` the
    operation's name if it is not that of ``body`` without a leading underscore. CUDA graphs hold
    operations that check nothing, ``replays``. The result is torch's ``CustomOpDef``, to be called
    in place of ``body``.
    """
    made = torch.library.custom_op(
        f"{NAMESPACE}::{name or body.__name__.lstrip('_')}",
        body,
        mutates_args=(),
        schema=schema or None,
        tags=() if replays else (torch.Tag.cudagraph_unsafe,),
    )
    made.register_fake(fake)
    return made


def in_graphs[**P, R](
    *, fake: Callable[..., R], name: str = "", replays: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function an :func:`operation` of compiled graphs alone: eager calls cost less."""

    def decorate(body: Callable[P, R]) -> Callable[P, R]:
        return _choose(body, operation(body, fake=fake, name=name, replays=replays))

    return decorate


def _choose[**P, R](body: Callable[P, R], compiled: Callable[P, R]) -> Callable[P, R]:
    @wraps(body)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (compiled if torch.compiler.is_compiling() else body)(*args, **kwargs)

    return call


def as_written(
    body: Callable[..., Tensor], *, fake: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """Make a function of torch operations one operation of compiled graphs, with gradients.

    Eagerly ``body`` is called. It is as for :func:`operation`, with one floating-point result.
    Gradients are autograd's, flow to all floating-point tensors among its arguments, including
    those in lists, and recompute the body from its arguments, the only saved tensors. ``fake`` is
    ``body`` by default, which must then read no value.
    """
    return _choose(body, _differentiable(body, fake or body))


def _differentiable(body: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    forward = operation(body, fake=fake)
    schema = torch.library.infer_schema(body, mutates_args=())

    def gradients(output_grad: Tensor, *inputs: Any) -> list[Tensor]:
        values, structure = pytree.tree_flatten(inputs)
        with _autograd():
            values = [v.detach().requires_grad_() if _is_differentiable(v) else v for v in values]
            wanted = [value for value in values if _is_differentiable(value)]
            output = body(*pytree.tree_unflatten(values, structure))
            found = torch.autograd.grad(output, wanted, output_grad)
        return _apart(found, output_grad)

    def empty_gradients(_: Tensor, *inputs: Any) -> list[Tensor]:
        values = pytree.tree_leaves(inputs)
        return [value.new_empty(value.shape) for value in values if _is_differentiable(value)]

    gradients.__name__ = f"{body.__name__}_backward"
    schema = schema.replace("(", "(Tensor output_grad, ", 1) + "[]"
    backward = operation(gradients, fake=empty_gradients, schema=schema)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
        values, ctx.structure = pytree.tree_flatten(inputs)
        ctx.save_for_backward(*(v if isinstance(v, Tensor) else None for v in values))
        ctx.constants = [None if isinstance(v, Tensor) else v for v in values]

    def differentiate(ctx: Any, output_grad: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.constants, strict=True)
        values = [constant if tensor is None else tensor for tensor, constant in pairs]
        found = iter(backward(output_grad, *pytree.tree_unflatten(values, ctx.structure)))
        grads = [next(found) if _is_differentiable(value) else None for value in values]
        return pytree.tree_unflatten(grads, ctx.structure)

    forward.register_autograd(differentiate, setup_context=keep)
    return forward


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _apart(gradients: Sequence[Tensor], output_grad: Tensor) -> list[Tensor]:
    """Return contiguous gradients in distinct memory: autograd may alias those of a sum."""
    taken = {output_grad.untyped_storage().data_ptr()}
    apart = []
    for gradient in gradients:
        own = gradient.contiguous()
        own = own.clone() if own.untyped_storage().data_ptr() in taken else own
        taken.add(own.untyped_storage().data_ptr())
        apart.append(own)
    return apart


@contextmanager
def _autograd() -> Iterator[None]:
    """Enable autograd, which is excluded inside operation bodies."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA"):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))
