"""Refuses weights and states that a failed load has partly replaced.

A load reads into the memory of weights, masters and moments. Where reading fails, some of it is the
checkpoint's and some is not, until another load reads into it to the end.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from moe_optim.errors import StateError

_replaced: dict[int, tuple[StorageWeakRef, str]] = {}
"""Storages by address, with the checkpoint that was read. The reference keeps the address taken."""


def mark_partly_loaded(tensors: Iterable[Tensor], checkpoint: str) -> None:
    """Record that a load of ``checkpoint`` into ``tensors`` has failed."""
    for address, tensor in _storages(tensors):
        _replaced[address] = StorageWeakRef(tensor.untyped_storage()), checkpoint


def mark_loaded(tensors: Iterable[Tensor]) -> None:
    """Record that a load into ``tensors`` has ended."""
    if _replaced:
        for address, _ in _storages(tensors):
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
