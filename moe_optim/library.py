"""Operations of compiled graphs, whose bodies run as written.

``torch.compile`` may rearrange and fuse what it sees, which moves last bits, and it can neither
read a value nor ask a bucket. An operation is one node of a graph, in namespace ``moe_optim``: the
compiler knows shapes and dtypes of its results, and calls the body at every run of the graph. So
bits are those of a run without compiling, and checks in a body are made every time.

All operations return new tensors and change no tensor they are given. They stay outside of CUDA
graphs, whose replays would skip the checks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

NAMESPACE = "moe_optim"


def operation(body: Callable[..., Any], *, fake: Callable[..., Any], schema: str = "") -> Any:
    """Register a function as the operation of its name.

    Args:
        body: reads tensors and constants, as its annotations say, and returns tensors that share
            no memory with them. A leading underscore is not part of the operation's name.
        fake: the same arguments, without values -> results of the right shapes, dtypes, strides.
        schema: arguments and results, where annotations do not say it.

    Returns:
        torch's ``CustomOpDef``, to be called in place of ``body``. It has no gradient yet.
    """
    made = torch.library.custom_op(
        f"{NAMESPACE}::{body.__name__.lstrip('_')}",
        body,
        mutates_args=(),
        schema=schema or None,
        tags=(torch.Tag.cudagraph_unsafe,),
    )
    made.register_fake(fake)
    return made


def as_written(
    body: Callable[..., Tensor], *, fake: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """Make a function of torch's operations one operation of compiled graphs, gradients included.

    Gradients are those that torch finds for the body. A backward pass computes it once more; until
    then only its arguments are kept.

    Args:
        body: function as in :func:`operation`, with one floating-point result. Gradients flow to
            all floating-point tensors among its arguments, lists included.
        fake: function as in :func:`operation`; the body, if it reads no value.

    Returns:
        ``body`` where nothing is being compiled, and the operation where something is.
    """
    compiled = _differentiable(body, fake or body)

    @wraps(body)
    def call(*inputs: Any) -> Tensor:
        result: Tensor = (compiled if torch.compiler.is_compiling() else body)(*inputs)
        return result

    return call


def _differentiable(body: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    forward = operation(body, fake=fake)
    schema = torch.library.infer_schema(body, mutates_args=())

    def gradients(output_grad: Tensor, *inputs: Any) -> list[Tensor]:
        values, structure = pytree.tree_flatten(inputs)
        values = [_as_leaf(value) if _is_differentiable(value) else value for value in values]
        wanted = [value for value in values if _is_differentiable(value)]
        with _autograd():
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
    """Return gradients contiguous, each in memory of its own: summands share that of a sum."""
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
    """Record what is computed for autograd, which does not see into bodies of operations."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _as_leaf(value: Tensor) -> Tensor:
    with _autograd():
        return value.detach().requires_grad_()


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA"):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))
