"""What a rank owns of a distributed optimizer: parameters, masters, gradients and weights."""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.weights.managed import is_managed, is_tensorwise
from moe_optim.weights.names import parameter_names

_MAIN_GRAD = attrgetter("main_grad")


def owned_masters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield every parameter of which this rank owns a part, and its master."""
    yield from zip(flat_params(optimizer), flat_masters(optimizer), strict=True)


def flat_params(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return every parameter of which this rank owns a part."""
    groups = chain(optimizer.model_float16_groups, optimizer.model_fp32_groups)
    return list(chain.from_iterable(groups))


def flat_masters(optimizer: Any) -> list[Tensor]:
    """Return the masters of :func:`flat_params`, in their order."""
    groups = chain(optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups)
    return list(chain.from_iterable(groups))


def gradients_of(params: Iterable[Any]) -> list[Tensor | None]:
    """Return the ``main_grad`` of each parameter; None where it has none."""
    try:
        return list(map(_MAIN_GRAD, params))
    except AttributeError:
        return [getattr(param, "main_grad", None) for param in params]


def gradient_of(optimizer: Any, param: Any) -> Tensor:
    """Return what this rank owns of a gradient, where it lies."""
    owned = optimizer._get_model_param_range_map(param)["param"]
    whole: Tensor | None = getattr(param, "main_grad", None)
    if whole is None or whole.numel() != param.numel():
        name = parameter_names(optimizer.model_chunks).get(param, "a parameter")
        found = "none" if whole is None else f"{list(whole.shape)}"
        raise StateError(
            f"optimizer step: {name}: expected main_grad of {param.numel()} elements, got {found}. "
            "Give it back the tensor that DistributedDataParallel had put there."
        )
    gradient = whole.view(-1)[owned.start : owned.end]
    if not gradient.untyped_storage().size():
        raise StateError(
            "optimizer step: expected gradient memory, got none: it is offloaded. Call "
            "restore_grad_buffers() on the DDP module before optimizer.step()."
        )
    return gradient


def weight_of(optimizer: Any, param: Any, master: Tensor) -> Tensor | None:
    """Return where this rank writes its part of a weight, in the dtype of the weight.

    Returns:
        A view; None where the master lies there, and of quantized weights.
    """
    if is_managed(param) or is_tensorwise(param):
        return None
    place = optimizer._get_model_param_range_map(param)["gbuf_world_in_bucket"]
    buffer, _, bucket = optimizer.model_param_gbuf_map[param]
    weights = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
    weight: Tensor = weights[place.start : place.end]
    return None if weight.data_ptr() == master.data_ptr() else weight
