"""Refuses weights and states that a failed load has partly replaced.

A load reads into the memory of weights, masters and moments, and an optimizer then takes parameter
groups, and states that were read elsewhere. Where either fails, some of it is the checkpoint's and
some is not, until another load reads into it to the end.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from moe_optim.errors import StateError

_replaced: dict[int, tuple[StorageWeakRef, str]] = {}
"""Storages by address, with the checkpoint that was read. The reference keeps the address taken."""


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
    except Exception:
        if has_begun():
            for address, tensor in _storages(tensors()):
                _replaced[address] = StorageWeakRef(tensor.untyped_storage()), checkpoint
        raise
    for address, _ in _storages(tensors()) if _replaced and is_whole() else ():
        _replaced.pop(address, None)


def require_loaded(tensors: Iterable[Tensor]) -> None:
    """Raise StateError if a failed load has replaced a part of ``tensors``; no rank communicates.

    Costs nothing while there has been no such load; ``tensors`` are not even asked for.
    """
    for address in [address for address, (held, _) in _replaced.items() if held.expired()]:
        del _replaced[address]
    for address, _ in _storages(tensors) if _replaced else ():
        if address in _replaced:
            raise StateError(
                "weights and optimizer states: expected those of one checkpoint, got memory that a "
                f"failed load of {_replaced[address][1]} has partly replaced. Load another "
                "checkpoint, or start the run again."
            )


def _storages(tensors: Iterable[Tensor]) -> Iterable[tuple[int, Tensor]]:
    for tensor in tensors:
        if type(tensor) in (Tensor, Parameter) and not tensor.is_meta:
            yield tensor.untyped_storage()._cdata, tensor
