"""What fused steps of one optimizer depend on, noted in one place and compared at every step.

Megatron's step reads all of it anew: which tensors are gradients, masters and moments, what group a
master is in, which norm its gradient counts in. A fused step has planned with it, and has to notice
where something was exchanged, moved, or regrouped. There are thousands of tensors, so all of them
are compared in loops of C.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, call, is_not, itemgetter
from typing import Any
from weakref import ref

from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.optimizer.adam import MOMENTS
from moe_optim.optimizer.owned import flat_masters, flat_params, gradients_of
from moe_optim.places import addresses_of

_PARAM_DATA, _ATTRIBUTES = attrgetter("param_data"), attrgetter("__dict__")
_PARAMS, _MOMENTS = itemgetter("params"), itemgetter(*MOMENTS)
OF_NORMS = (
    *("shared", "tensor_model_parallel", "allreduce", "is_gtp_weight_remat"),
    "grad_norm_group",
)
"""Attributes of a master that say whether its gradient counts, and in which norm."""


class Page:
    """Objects and values as they were last found.

    Attributes:
        generation: how often something else was found, the first time included.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._objects: Sequence[object] = ()
        self._values: list[object] = []

    def compare(self, objects: Sequence[object], values: list[object]) -> int:
        """Note what is there now, and return the generation.

        Args:
            objects: compared by identity, and held.
            values: compared by equality; no tensors among them.
        """
        same = len(objects) == len(self._objects) and values == self._values
        if not same or any(map(is_not, objects, self._objects)) or not self.generation:
            self._objects, self._values = objects, values
            self.generation += 1
        return self.generation


class AddressBook:
    """See the module.

    Args:
        optimizer: a ``GroupedDistributedOptimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._gradients, self._states = Page(), Page()
        self._attributes: list[dict[str, Any]] = []
        self._counts_in: list[tuple[Any, ...]] = []
        self._moments: list[ref[Tensor]] = []
        self._exchanges = 0  # of moments

    def look_at_gradients(self) -> int:
        """Return a number that is another one where norms read other gradients than before.

        That is: another tensor is a parameter's ``main_grad``, or it lies elsewhere; another is a
        master; one counts otherwise than before; zeros are to be counted.
        """
        optimizer = self._optimizer
        masters, gradients = flat_masters(optimizer), gradients_of(flat_params(optimizer))
        groups = (getattr(optimizer, name, None) for name in ("tp_group", "expert_tp_group"))
        return self._gradients.compare(
            [*masters, *gradients, *groups],
            [
                _addresses_or_none(gradients),
                self._look_at_attributes(masters),
                optimizer.config.log_num_zeros_in_grad,
            ],
        )

    def look_at_states(self) -> int:
        """Return a number that is another one where an update reads or writes other tensors.

        That is: gradients were found to be others when :meth:`look_at_gradients` last looked;
        moments are others, or lie elsewhere; a master is in another parameter group; there is
        another number of groups; weight decay is applied in another way; weights have other memory.
        Where masters lie, tables and buckets ask.
        """
        optimizer = self._optimizer
        inner = optimizer.optimizer
        of_groups = list(map(_PARAMS, inner.param_groups))
        moments = find_moments(inner)
        self._look_at_moments(moments)
        weights = (map(_PARAM_DATA, buffer.buckets) for buffer in optimizer.buffers)
        generation = self._states.compare(
            [inner, optimizer.grad_scaler, *chain(*of_groups), *chain(*weights)],
            [
                self._exchanges,
                addresses_of(moments),
                list(map(len, of_groups)),
                [_decouples(inner, group) for group in inner.param_groups],
            ],
        )
        return self._gradients.generation + generation  # neither ever falls

    def _look_at_attributes(self, masters: Sequence[Tensor]) -> list[tuple[Any, ...]]:
        """Return the attributes of each master that its norm depends on."""
        attributes = list(map(_ATTRIBUTES, masters))
        if not _are_equal(attributes, self._attributes):
            self._attributes = list(map(dict, attributes))
            self._counts_in = [tuple(map(one.get, OF_NORMS)) for one in attributes]
        return self._counts_in

    def _look_at_moments(self, moments: Sequence[Tensor]) -> None:
        """Note whether Adam has other moments; they are not held: offloading frees them."""
        same = len(moments) == len(self._moments)
        if not same or any(map(is_not, moments, map(call, self._moments))):
            self._moments = list(map(ref, moments))
            self._exchanges += 1


def find_moments(inner: Any) -> list[Tensor]:
    """Return the tensors that Adam has for moments now."""
    states = inner.state.values()
    try:
        return list(chain.from_iterable(map(_MOMENTS, states)))
    except KeyError:  # of masters that have not stepped
        return [state[name] for state in states for name in MOMENTS if name in state]


def is_decoupled(inner: Any) -> bool:
    """Return whether weight decay is added to the update (AdamW), and not to the gradient.

    Raises:
        StateError: in some parameter groups it is, and in others not.
    """
    modes = {_decouples(inner, group) for group in inner.param_groups if group["params"]}
    if len(modes) > 1:
        raise StateError(
            "optimizer step: expected one adam_w_mode in all parameter groups, got True and False. "
            "Make them equal, or set step: stock, which reads that of each group."
        )
    return modes != {False}


def _decouples(inner: Any, group: dict[str, Any]) -> bool:
    """Return what Adam reads at every step: Transformer Engine's of itself, ours of the group."""
    return bool(getattr(inner, "adam_w_mode", group.get("adam_w_mode", True)))


def _addresses_or_none(tensors: Sequence[Tensor | None]) -> list[int | None]:
    try:
        return list(addresses_of(tensors))  # type: ignore[arg-type]
    except TypeError:  # None is no tensor
        return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _are_equal(found: list[dict[str, Any]], noted: list[dict[str, Any]]) -> bool:
    try:
        return found == noted
    except RuntimeError:  # tensors among them, which have no truth
        return False
