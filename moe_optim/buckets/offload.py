"""``param_data`` of a managed buffer, which Megatron and RL stacks offload.

Megatron's buffers and verl's workers offload weights with the same calls: ``cpu()``, or ``copy_()``
of a host tensor, to copy, ``storage().resize_(0)`` to free, ``storage().resize_(size)`` to
reallocate and ``copy_()`` to fill. Quantized weights consist of several allocations, so no single
tensor can represent them.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

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

    @property
    def shape(self) -> torch.Size:
        """Shape of a copy on the host, also while the weights are offloaded: [bytes]."""
        return torch.Size([sum(self._away.values()) or self.size()])

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
        pinned = self.device.type == "cuda"
        on_host = torch.empty(self.shape, dtype=self.dtype, device="cpu", pin_memory=pinned)
        return self._copy_to(on_host)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Copy the bytes into a tensor [bytes] uint8, ``on_host.copy_(param_data)``, as verl does.

        Waits for the copy. Everything else that torch does with tensors raises TypeError.
        """
        if func is Tensor.copy_ and isinstance(args[1], cls):
            return args[1]._copy_to(args[0])
        return NotImplemented

    def _copy_to(self, on_host: Tensor) -> Tensor:
        if self._away:
            raise StateError(
                "param_data of quantized weights: expected bytes to copy, got none: they are on "
                "the host. Call reload_from_cpu() on the buffers of the DDP module first."
            )
        if (on_host.shape, on_host.dtype) != (self.shape, self.dtype):
            raise StateError(
                f"param_data of quantized weights: expected a copy into {list(self.shape)} "
                f"{self.dtype}, got one into {list(on_host.shape)} {on_host.dtype}. Allocate the "
                "tensor with the shape and dtype of param_data."
            )
        self._before_read()
        memories = self._memories()
        parts = on_host.split([memory.nbytes() for memory in memories])
        for part, memory in zip(parts, memories, strict=True):
            part.copy_(_bytes_of(memory), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
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
