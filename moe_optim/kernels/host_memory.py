"""Pinned host memory that kernels read and write in place, streaming over the link both ways.

It relies on unified addressing: pinned memory has the same address on the GPU and on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.formats import round_up

SEGMENT_BYTES = 1 << 30
"""Bytes per segment, a power of two because torch pins powers of two."""
_ALIGNMENT = 256  # bytes, as in torch's CUDA allocator


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """Host memory as a device tensor and a CPU tensor; without a GPU they are one tensor."""

    on_device: Tensor
    on_host: Tensor
    """CPU tensor; synchronize with the device before reading it."""


class HostMemory:
    """Allocator of host memory for tensors of ``device``, in segments that are never freed.

    ``expected_bytes`` estimates the total, so that small jobs do not pin a whole segment.
    """

    def __init__(self, device: torch.device, expected_bytes: int = SEGMENT_BYTES) -> None:
        self.device = device
        self._segment_bytes = min(SEGMENT_BYTES, _power_of_two(expected_bytes))
        self._segments: list[tuple[HostTensor, int]] = []  # segment, bytes in use

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far, pinned if the device is a GPU."""
        return sum(segment.on_host.nbytes for segment, _ in self._segments)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> HostTensor:
        """Return uninitialized memory for a contiguous tensor."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        index, start = self._find(nbytes)
        segment, _ = self._segments[index]
        self._segments[index] = segment, start + round_up(nbytes, _ALIGNMENT)
        on_device, on_host = (
            side[start : start + nbytes].view(dtype).view(tuple(shape))
            for side in (segment.on_device, segment.on_host)
        )
        return HostTensor(on_device, on_host)

    def _find(self, nbytes: int) -> tuple[int, int]:
        for index, (segment, taken) in enumerate(self._segments):
            if segment.on_host.nbytes - taken >= nbytes:
                return index, taken
        self._segments.append((self._allocate(max(nbytes, self._segment_bytes)), 0))
        return len(self._segments) - 1, 0

    def _allocate(self, nbytes: int) -> HostTensor:
        if self.device.type != "cuda":
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return HostTensor(memory, memory)
        pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # as_tensor treats memory with this interface as GPU memory, and does not copy
        on_device = torch.as_tensor(_Exposed(pinned), device=self.device)
        if on_device.data_ptr() != pinned.data_ptr():
            raise StateError(
                "memory of the host: expected a GPU that reaches pinned memory at the host's own "
                f"address, got another one on {self.device}. Set offload_states: 0."
            )
        return HostTensor(on_device, pinned)


class _Exposed:
    """Adapter from pinned memory to ``torch.as_tensor`` on the GPU; the result keeps it alive."""

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
    """Select nonempty items evenly along a sequence, for at most ``fraction`` of its total size."""
    chosen, seen, taken = [], 0, 0
    for size in sizes:
        seen += size
        is_chosen = 0 < size <= fraction * seen - taken
        taken += size * is_chosen
        chosen.append(is_chosen)
    return chosen
