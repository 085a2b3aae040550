"""The bytes of a managed buffer's weights, as Megatron and RL stacks handle ``param_data``.

Megatron's buffers and verl's workers send weights to the host by the same few calls: a copy by
``cpu()``, the memory freed by ``storage().resize_(0)``, taken again by ``storage().resize_(size)``
and filled by ``copy_()``. Quantized weights lie in several pieces of memory, so no tensor can be
all of them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.weights.storage import WeightStorage


class ParamData:
    """All bytes behind some weights, one after the other, whoever reads or gathers them.

    Tensors stay what they are, and views of each other; only the memory behind them goes and comes
    back, perhaps elsewhere.

    Args:
        storages: storages of the weights.
        before_read: call that finishes their gathers.
        leaves: call that notes that the bytes are no longer here.
        returned: call that notes that they are again; addresses are others then.
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
        self._away: dict[torch.UntypedStorage, int] = {}  # and their sizes in bytes

    @property
    def device(self) -> torch.device:
        """Device of the weights, also while they are away."""
        return self._storages[0].device

    @property
    def data(self) -> "ParamData":
        """Itself."""
        return self

    def storage(self) -> "ParamData":
        """Return itself, which has the methods of a storage, too."""
        return self

    untyped_storage = storage

    def size(self) -> int:
        """Return the number of bytes for which there is memory."""
        return sum(memory.nbytes() for memory in self._memories())

    def resize_(self, size: int) -> None:
        """Free all memory (0), or take again as much as there was, with undefined contents."""
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
        """Return a copy on the host, [bytes] uint8, pinned where the weights are on a GPU."""
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
        """Fill the memory with what :meth:`cpu` returned; raise RuntimeError if there is none.

        Args:
            on_host: [bytes] uint8, any device.
            non_blocking: argument of ``Tensor.copy_``.
        """
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
