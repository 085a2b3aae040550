"""The masters that a rank owns, and change detection for every input of a fused step.

Megatron's step looks up gradients, masters, moments, parameter groups and norm groups every time; a
fused step plans with them once. The address book compares all of them once per step and numbers
what it finds; plans record the number they were built for. With thousands of tensors, the
comparisons run in C loops.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, call, is_not, itemgetter
from typing import Any
from weakref import ref

import torch
from megatron.core.optimizer.optimizer import (
    SEPARATE_GRAD_NORM_GROUPS,
    _get_param_grad_norm_group,
)
from torch import Tensor

from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.errors import StateError
from moe_optim.optimizer.adam import MOMENTS
from moe_optim.places import Attributes, addresses_of
from moe_optim.weights.managed import is_managed
from moe_optim.weights.names import parameter_names
from moe_optim.weights.te.fields import is_tensorwise

NORMS = (None, *sorted(SEPARATE_GRAD_NORM_GROUPS))
"""Gradient norms: the main norm, then the groups whose norm Megatron computes separately."""

_MAIN_GRAD = attrgetter("main_grad")
_NORM_ATTRIBUTES = (
    *("shared", "tensor_model_parallel", "allreduce", "is_gtp_weight_remat"),
    "grad_norm_group",
)
"""Attributes of a master that decide whether its gradient counts, and in which norm."""


# Owned shards


def owned_masters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield every parameter that this rank owns a shard of, with its master."""
    yield from zip(flat_params(optimizer), flat_masters(optimizer), strict=True)


def flat_params(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return every parameter that this rank owns a shard of."""
    groups = chain(optimizer.model_float16_groups, optimizer.model_fp32_groups)
    return list(chain.from_iterable(groups))


def flat_masters(optimizer: Any) -> list[Tensor]:
    """Return the masters of :func:`flat_params`, in the same order."""
    groups = chain(optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups)
    return list(chain.from_iterable(groups))


def norm_of(master: Tensor) -> int:
    """Return the index in ``NORMS`` of the norm that a master's gradient counts in."""
    group = _get_param_grad_norm_group(master)
    return NORMS.index(group) if group in NORMS else 0


def gradient_of(optimizer: Any, param: Any) -> Tensor:
    """Return this rank's shard of a gradient, a view; raise StateError if missing or offloaded."""
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
    """Return this rank's shard of a weight, a view; None if quantized or its own master."""
    if is_managed(param) or is_tensorwise(param):
        return None
    place = optimizer._get_model_param_range_map(param)["gbuf_world_in_bucket"]
    buffer, _, bucket = optimizer.model_param_gbuf_map[param]
    weights = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
    weight: Tensor = weights[place.start : place.end]
    return None if weight.data_ptr() == master.data_ptr() else weight


# Change detection


class Page:
    """Snapshot of objects and values; ``generation`` counts its changes."""

    def __init__(self) -> None:
        self.generation = 0
        self._objects: Sequence[object] = ()
        self._values: list[object] = []

    def compare(self, objects: Sequence[object], values: list[object]) -> int:
        """Update the snapshot and return its generation.

        Objects are compared by identity and kept alive; values are compared by equality.
        """
        same = len(objects) == len(self._objects) and values == self._values
        if not same or any(map(is_not, objects, self._objects)) or not self.generation:
            self._objects, self._values = objects, values
            self.generation += 1
        return self.generation


class AddressBook:
    """Inputs of a fused step. Each check returns a generation that increases on every change.

    Attributes:
        unmanaged: parameters outside managed buckets, with their masters, as of the last check.
        tensorwise: fields of weights that a fused step casts with per-tensor scaling; None without.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._masters, self._gradients, self._states = Page(), Page(), Page()
        self._buckets: defaultdict[ManagedBucket, int] = defaultdict(lambda: 1)
        self._of_masters: list[dict[str, Any]] = []  # attributes of masters, then a snapshot:
        self._attributes: list[dict[str, Any]] = []
        self._counts_in: list[tuple[Any, ...]] = []
        self._moments: list[ref[Tensor]] = []
        self._exchanges = 0  # of moments
        self.unmanaged: list[tuple[torch.nn.Parameter, Tensor]] = []
        self.tensorwise: Attributes | None = None

    def check_masters(self) -> int:
        """Check for exchanged masters."""
        before, masters = self._masters.generation, flat_masters(self._optimizer)
        if self._masters.compare(masters, []) != before:
            self._of_masters = [vars(one) for one in masters if one is not None]
            pairs = zip(flat_params(self._optimizer), masters, strict=True)
            self.unmanaged = [pair for pair in pairs if not is_managed(pair[0])]
        return self._masters.generation

    def check_gradients(self) -> int:
        """Check everything that the gradient norms depend on.

        This includes the masters, each parameter's ``main_grad`` and its address, the attributes
        that select a norm, and whether zeros are counted.
        """
        optimizer = self._optimizer
        masters, params = self.check_masters(), flat_params(optimizer)
        gradients: list[Tensor | None]
        addresses: list[int | None]
        try:
            gradients = list(map(_MAIN_GRAD, params))
            addresses = list(map(Tensor.data_ptr, gradients))  # type: ignore[arg-type]
        except (AttributeError, TypeError):  # a parameter without gradient
            gradients = [getattr(param, "main_grad", None) for param in params]
            addresses = [None if one is None else one.data_ptr() for one in gradients]
        try:
            same = self._of_masters == self._attributes
        except RuntimeError:  # tensors have no truth value
            same = False
        if not same:
            self._attributes = list(map(dict, self._of_masters))
            self._counts_in = [tuple(map(one.get, _NORM_ATTRIBUTES)) for one in self._attributes]
        groups = [getattr(optimizer, name, None) for name in ("tp_group", "expert_tp_group")]
        return masters + self._gradients.compare(
            [*gradients, *groups],
            [addresses, self._counts_in, optimizer.config.log_num_zeros_in_grad],
        )

    def check_states(self) -> int:
        """Check everything that an update depends on, except for :meth:`check_bucket`.

        This includes moments and their addresses, parameter groups and their members, the kind of
        weight decay, the memory of masters and weights outside managed buckets, and gradients as of
        the last :meth:`check_gradients`.
        """
        optimizer = self._optimizer
        inner = optimizer.optimizer
        of_groups = [group["params"] for group in inner.param_groups]
        moments = find_moments(inner)
        same = len(moments) == len(self._moments)
        if not same or any(map(is_not, moments, map(call, self._moments))):
            self._moments = list(map(ref, moments))  # not held: offloading frees them
            self._exchanges += 1
        weights = [bucket.param_data for buffer in optimizer.buffers for bucket in buffer.buckets]
        weights = [one for one in weights if isinstance(one, Tensor)]
        states = self._states.compare(
            [inner, optimizer.grad_scaler, *chain.from_iterable(of_groups), *weights],
            [
                self._exchanges,
                addresses_of(moments),
                addresses_of([*weights, *[master for _, master in self.unmanaged]]),
                None if self.tensorwise is None else self.tensorwise.addresses(),
                list(map(len, of_groups)),
                getattr(inner, "adam_w_mode", None),
                [group.get("adam_w_mode") for group in inner.param_groups],
            ],
        )
        return self._masters.generation + self._gradients.generation + states

    def check_bucket(self, bucket: ManagedBucket) -> int:
        """Check whether masters or weights of a bucket have moved since it was planned."""
        if bucket.has_moved:
            self._buckets[bucket] += 1
        return self._masters.generation + self._buckets[bucket]


def find_moments(inner: Any) -> list[Tensor]:
    """Return the moments that an inner optimizer currently holds."""
    states, names = inner.state.values(), state_names(inner)
    try:
        return list(chain.from_iterable([map(itemgetter(name), states) for name in names]))
    except KeyError:  # before the first step
        return [state[name] for state in states for name in names if name in state]


def state_names(inner: Any) -> tuple[str, ...]:
    """Return the names of an inner optimizer's states: Adam's moments or Muon's momentum."""
    return getattr(inner, "state_names", MOMENTS)


def is_decoupled(inner: Any) -> bool:
    """Return whether weight decay is decoupled (AdamW); raise StateError if groups differ.

    Transformer Engine's Adam reads its own attribute at every step, ours that of a group.
    """
    modes = {
        bool(getattr(inner, "adam_w_mode", group.get("adam_w_mode", True)))
        for group in inner.param_groups
        if group["params"]
    }
    if len(modes) > 1:
        raise StateError(
            "optimizer step: expected one adam_w_mode in all parameter groups, got True and False. "
            "Make them equal, or set step: stock, which reads that of each group."
        )
    return modes != {False}
