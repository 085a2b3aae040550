"""Memory of the host that kernels read and write where it lies.

A GPU reaches pinned memory of the host at the address that the host has for it. So a tensor of the
GPU can lie over such memory: kernels stream its elements over the link, in both directions at once,
and whoever else reads it as a tensor of the GPU gets its values, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.formats import round_up

SLAB_BYTES = 1 << 30
"""Of a piece of memory that tensors are put into; torch pins powers of two."""
_ALIGNMENT = 256  # bytes, as of memory that torch allocates on a GPU


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """One piece of memory of the host, seen from both sides. Without a GPU both are the same."""

    on_device: Tensor
    """A tensor of the device."""
    on_host: Tensor
    """A tensor of the CPU. Reading it has to wait for what the device does."""


class HostMemory:
    """Memory of the host for tensors of a device, taken slab by slab and never given back.

    Args:
        device: that reads and writes it.
        expected_bytes: about how much will be taken, so that little work pins no whole slab.

    Attributes:
        device: as given.
    """

    def __init__(self, device: torch.device, expected_bytes: int = SLAB_BYTES) -> None:
        self.device = device
        self._slab_bytes = min(SLAB_BYTES, _power_of_two(expected_bytes))
        self._slabs: list[tuple[HostTensor, int]] = []  # and how much of each is taken

    @property
    def nbytes(self) -> int:
        """How much memory of the host there is by now, pinned where the device is a GPU."""
        return sum(slab.on_host.nbytes for slab, _ in self._slabs)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> HostTensor:
        """Return memory for a contiguous tensor; what it holds is undefined.

        Raises:
            StateError: this GPU does not reach pinned memory where it lies.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        index, start = self._find(nbytes)
        slab, _ = self._slabs[index]
        self._slabs[index] = slab, start + round_up(nbytes, _ALIGNMENT)
        on_device, on_host = (
            side[start : start + nbytes].view(dtype).view(tuple(shape))
            for side in (slab.on_device, slab.on_host)
        )
        return HostTensor(on_device, on_host)

    def _find(self, nbytes: int) -> tuple[int, int]:
        """Return a slab with so much room, and where in it that begins."""
        for index, (slab, taken) in enumerate(self._slabs):
            if slab.on_host.nbytes - taken >= nbytes:
                return index, taken
        self._slabs.append((self._allocate(max(nbytes, self._slab_bytes)), 0))
        return len(self._slabs) - 1, 0

    def _allocate(self, nbytes: int) -> HostTensor:
        if self.device.type != "cuda":
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return HostTensor(memory, memory)
        pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # as_tensor takes what the interface names for memory of the GPU, and copies nothing
        on_device = torch.as_tensor(_Exposed(pinned), device=self.device)
        if on_device.data_ptr() != pinned.data_ptr():
            raise StateError(
                "memory of the host: expected a GPU that reaches pinned memory at the host's own "
                f"address, got another one on {self.device}. Set offload_states: 0."
            )
        return HostTensor(on_device, pinned)


class _Exposed:
    """Pinned memory under the interface by which libraries hand memory of GPUs to each other.

    The tensor that is made of it holds it, and so the memory.
    """

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self._pinned.shape),
            "typestr": "|u1",
            "data": (self._pinned.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 1).bit_length()


def spread(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Choose of things in a row, evenly along it, at most this fraction of what they weigh.

    Args:
        sizes: what each weighs; those of 0 are not chosen.
        fraction: 0 to 1.
    """
    chosen, seen, taken = [], 0, 0
    for size in sizes:
        seen += size
        is_chosen = 0 < size <= fraction * seen - taken
        taken += size * is_chosen
        chosen.append(is_chosen)
    return chosen
