"""Refuses weights and states that a failed load has partly replaced.

A load reads into the memory of weights, masters and moments; modules then take their state, and an
optimizer parameter groups, and states that were read elsewhere. Where any of it fails, some is the
checkpoint's and some is not, until another load ends.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, Parameter

from moe_optim.errors import StateError, listed, shorten
from moe_optim.integration.agreement import agree

_replaced: dict[int, tuple[StorageWeakRef, str]] = {}
"""Storages by address, with the checkpoint that was read. The reference keeps the address taken."""


@dataclass
class _ModuleLoad:
    """The last ``load_state_dict`` of a module."""

    errors: list[str]
    """What torch raises at its end, if anything; it adds keys after all hooks."""
    has_ended: bool = False


_watched: WeakSet[Module] = WeakSet()

_module_loads: WeakKeyDictionary[Module, _ModuleLoad] = WeakKeyDictionary()
"""Loads of watched modules that are not known to have succeeded."""

_loads = 0
"""Number of loads that all ranks have begun together."""


@contextmanager
def replacing(
    tensors: Callable[[], Iterable[Tensor]],
    checkpoint: str,
    has_begun: Callable[[], bool] = lambda: True,
    is_whole: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Record of a load in this context that it failed, or that it ended; no rank communicates.

    Args:
        tensors: function that returns what is loaded into, called when the load is over.
        checkpoint: source in error messages.
        has_begun: function that returns whether a failed load may have replaced anything.
        is_whole: function that returns whether a load that ended has replaced everything, so that
            nothing of an earlier one that failed is left.
    """
    try:
        yield
    except BaseException:  # an interrupted load has replaced a part, too
        if has_begun():
            for address, tensor in _storages(tensors()):
                _replaced[address] = StorageWeakRef(tensor.untyped_storage()), checkpoint
        raise
    for address, _ in _storages(tensors()) if _replaced and is_whole() else ():
        _replaced.pop(address, None)


def watch_loads(model_chunks: Iterable[Module]) -> None:
    """Record from now on whether ``load_state_dict`` of model chunks, without wrappers, ends."""
    for chunk in model_chunks:
        module = chunk
        while isinstance(inner := getattr(module, "module", None), Module):
            module = inner
        if module not in _watched:
            module.register_load_state_dict_pre_hook(_begin)
            module.register_load_state_dict_post_hook(_end)
            _watched.add(module)


def _begin(module: Module, *given: Any) -> None:
    _module_loads[module] = _ModuleLoad(errors=given[-1])


def _end(module: Module, _: Any) -> None:
    _module_loads[module].has_ended = True


def expect_agreement() -> None:
    """Have :func:`require_loaded_everywhere` agree again. Every rank must call it."""
    global _loads
    _loads += 1


def require_loaded_everywhere(tensors: Callable[[], Iterable[Tensor]], agreed: int) -> int:
    """Raise as :func:`require_loaded`, also for what a load of another rank has partly replaced.

    Every rank must call it; none communicates unless there was a load since the last call.

    Args:
        tensors: function that returns what is loaded into.
        agreed: result of the last call for these tensors, 0 before the first.

    Returns:
        Number of loads so far.
    """
    if agreed == _loads:
        require_loaded(tensors)
    else:
        agree(partial(require_loaded, tensors), None)
    return _loads


def require_loaded(tensors: Callable[[], Iterable[Tensor]]) -> None:
    """Raise StateError if a failed load has replaced a part of ``tensors``; no rank communicates.

    Costs nothing while there has been no such load; ``tensors`` is not even called.
    """
    for address in [address for address, (held, _) in _replaced.items() if held.expired()]:
        del _replaced[address]
    replaced = {address: checkpoint for address, (_, checkpoint) in _replaced.items()}
    for module, load in list(_module_loads.items()):
        if load.has_ended and not load.errors:
            del _module_loads[module]
            continue
        name = f"the state of {type(module).__name__}"
        if load.errors:
            name += f" ({listed([shorten(error.strip()) for error in load.errors])})"
        replaced |= {address: name for address, _ in _storages(module.parameters())}
    for address, _ in _storages(tensors()) if replaced else ():
        if address in replaced:
            raise StateError(
                "weights and optimizer states: expected those of one checkpoint, got memory that a "
                f"failed load of {replaced[address]} has partly replaced. Load another checkpoint, "
                "or start the run again. If load_state_dict has only found keys unexpected or "
                "missing, repeat it with strict=False."
            )


def _storages(tensors: Iterable[Tensor]) -> Iterable[tuple[int, Tensor]]:
    for tensor in tensors:
        if type(tensor) in (Tensor, Parameter) and not tensor.is_meta:
            yield tensor.untyped_storage()._cdata, tensor
