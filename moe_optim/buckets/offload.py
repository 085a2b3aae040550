"""``param_data`` of a managed buffer, which Megatron and RL stacks offload.

Megatron's buffers and verl's workers offload weights with the same calls: ``cpu()`` to copy,
``storage().resize_(0)`` to free, ``storage().resize_(size)`` to reallocate and ``copy_()`` to fill.
Quantized weights consist of several allocations, so no single tensor can represent them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.weights.storage import WeightStorage


class ParamData:
    """All bytes behind some weights, concatenated.

    Tensors and their views stay valid; only the memory behind them is freed and reallocated,
    possibly at another address.

    Args:
        before_read: callback to finish gathers of the weights.
        leaves: callback before the bytes are freed.
        returned: callback after the bytes are restored, at new addresses.
    """

    dtype = torch.uint8

    def __init__(
        self,
        storages: Sequence[WeightStorage],
        *,
        before_read: Callable[[], None] = lambda: None,
        leaves: Callable[[], None] = lambda: None,
        returned: Callable[[], None] = lambda: None,
    ) -> None:
        self._storages = tuple(storages)
        self._before_read, self._leaves, self._returned = before_read, leaves, returned
        self._away: dict[torch.UntypedStorage, int] = {}  # memory -> bytes

    @property
    def device(self) -> torch.device:
        """Device of the weights, also while they are offloaded."""
        return self._storages[0].device

    @property
    def data(self) -> "ParamData":
        """Itself."""
        return self

    def storage(self) -> "ParamData":
        """Return itself, which also has the methods of a storage."""
        return self

    untyped_storage = storage

    def size(self) -> int:
        """Return the number of allocated bytes."""
        return sum(memory.nbytes() for memory in self._memories())

    def resize_(self, size: int) -> None:
        """Free all memory (0), or reallocate it with undefined contents (the original size)."""
        whole = sum(self._away.values()) if self._away else self.size()
        if size not in (0, whole):
            raise StateError(
                f"param_data of quantized weights: expected a resize to 0 or {whole} bytes, got "
                f"{size}. Call offload_to_cpu() and reload_from_cpu() on the buffer."
            )
        if not self._away and size == 0:
            self._before_read()
            self._leaves()
            self._away = {memory: memory.nbytes() for memory in self._memories()}
        for memory, nbytes in self._away.items():
            memory.resize_(nbytes if size else 0)

    def cpu(self) -> Tensor:
        """Return a copy on the host, [bytes] uint8, pinned if the weights are on a GPU."""
        if self._away:
            raise StateError(
                "param_data of quantized weights: expected bytes to copy, got none: they are on "
                "the host. Call reload_from_cpu() on the buffers of the DDP module first."
            )
        self._before_read()
        memories = self._memories()
        pinned = self.device.type == "cuda"
        count = sum(memory.nbytes() for memory in memories)
        on_host = torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        parts = on_host.split([memory.nbytes() for memory in memories])
        for part, memory in zip(parts, memories, strict=True):
            part.copy_(_bytes_of(memory), non_blocking=True)
        if pinned:
            torch.cuda.current_stream().synchronize()
        return on_host

    def copy_(self, on_host: Tensor, non_blocking: bool = False) -> "ParamData":
        """Fill the memory with the result of :meth:`cpu`; raise StateError if there is none."""
        memories = list(self._away)
        if not memories:
            raise StateError(
                "param_data of quantized weights: expected weights on the host to copy back, got "
                "weights that are here. Load values through the parameters."
            )
        parts = on_host.split([memory.nbytes() for memory in memories])
        for part, memory in zip(parts, memories, strict=True):
            _bytes_of(memory).copy_(part, non_blocking=non_blocking)
        self._away = {}
        self._returned()
        return self

    def _memories(self) -> list[torch.UntypedStorage]:
        if self._away:
            return list(self._away)
        return list({m.data_ptr(): m for one in self._storages for m in one.memories()}.values())


def _bytes_of(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
