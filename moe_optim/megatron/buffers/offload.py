"""Quantized weights that wait on the host while something else needs the memory of the device."""

from collections.abc import Iterable

import torch
from torch import Tensor

from moe_optim.modules.storage import PlaneStorage


class HostPlanes:
    """The bytes of weights, moved to the host: their own memory is freed until :meth:`restore`.

    Tensors stay what they are, and views of each other; only the memory behind them goes and comes
    back, perhaps elsewhere.

    Args:
        storages: no gather of theirs is in flight, and their buckets know that they go.
    """

    def __init__(self, storages: Iterable[PlaneStorage]) -> None:
        memories = {m.data_ptr(): m for storage in storages for m in storage.memories()}
        self._held = tuple((memory, _to_host(memory)) for memory in memories.values())
        for memory, _ in self._held:
            memory.resize_(0)

    def restore(self) -> None:
        """Take memory again, and fill it with the bytes. What knew addresses has to plan anew."""
        for memory, on_host in self._held:
            memory.resize_(on_host.numel())
            _bytes_of(memory).copy_(on_host, non_blocking=True)


def _bytes_of(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _to_host(memory: torch.UntypedStorage) -> Tensor:
    pinned = memory.device.type == "cuda"
    on_host = torch.empty(memory.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return on_host.copy_(_bytes_of(memory))
