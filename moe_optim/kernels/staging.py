"""Staging of offloaded states: chunks are copied to the device, stepped there, and copied back.

Copy engines move the next chunk in and the previous one out while kernels step a chunk.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from weakref import WeakSet

import torch
from torch import Tensor

from moe_optim.formats import round_up
from moe_optim.kernels.cutting import Carver

SLOTS = 3
CHUNK_BYTES = 48 << 20
"""Bytes of masters and moments per chunk; exceeded only by a piece that cannot be cut."""
SMALLEST = 1 << 16
"""Elements of the smallest staged shard. Kernels step smaller ones in host memory, which is cheaper
than a copy."""
_ALIGNMENT = 256  # alignment of tensors in a slot, bytes

Copies = Sequence[tuple[Tensor, Tensor]]
"""Host tensors, and their device copies."""


class Stage:
    """Device memory of ``SLOTS`` slots that chunks pass through, and the streams that copy them."""

    _stages: "WeakSet[Stage]" = WeakSet()

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self._device = device
        self.slots = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)
        ]
        self._turns = cycle(range(SLOTS))
        self._depth = 0
        self._left: dict[int, torch.cuda.Event] = {}  # slot -> copy-out of its last chunk
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @classmethod
    def of(cls, device: torch.device, slot_bytes: int) -> "Stage":
        """Return a stage for chunks of this size, shared by all steps on the device if possible."""
        for stage in cls._stages:
            if stage._device == device and stage.slots[0].numel() >= slot_bytes:
                return stage
        stage = cls(device, slot_bytes)
        cls._stages.add(stage)
        return stage

    def next_slot(self) -> int:
        """Return the slot of the next chunk; consecutive chunks have different slots."""
        return next(self._turns)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Return a context for :meth:`run`; nested contexts let several tables overlap.

        Copies wait for previously queued work. When the outermost context exits, the current stream
        waits for all chunks; the host does not.
        """
        self._depth += 1
        if self._depth == 1 and self._streams is not None:
            self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
            self._left.clear()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.wait_for_all()

    def run(self, copies: Copies, slot: int, step: Callable[[], None]) -> None:
        """Copy a chunk into its slot, step it and copy it back, inside :meth:`opened`."""
        if self._streams is None:
            for on_host, on_device in copies:
                on_device.copy_(on_host)
            step()
            for on_host, on_device in copies:
                on_host.copy_(on_device)
            return
        inward, outward = self._streams
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(inward):
            if slot in self._left:
                inward.wait_event(self._left[slot])
            for on_host, on_device in copies:
                on_device.copy_(on_host, non_blocking=True)
        here.wait_stream(inward)
        step()
        outward.wait_stream(here)
        with torch.cuda.stream(outward):
            for on_host, on_device in copies:
                on_host.copy_(on_device, non_blocking=True)
        self._left[slot] = outward.record_event()

    def wait_for_all(self) -> None:
        """Make the current stream wait until all chunks are back on the host."""
        if self._streams is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[1])


@dataclass(frozen=True, slots=True)
class StagedRange:
    """Part of a shard in one chunk."""

    shard: int
    first: int
    last: int
    """End (exclusive); both count elements in the shard."""


def pack(shards: Iterable[tuple[Sequence[int], int]]) -> list[list[StagedRange]]:
    """Divide shards into chunks, in order, and cut them only at allowed ends.

    ``shards`` gives the allowed ends of each shard, ascending, its own end included, and the bytes
    per element of master and moments together.
    """
    chunks: list[list[StagedRange]] = []
    room = 0
    for number, (ends, element_bytes) in enumerate(shards):
        first = 0
        while first < ends[-1]:
            fitting = bisect_right(ends, first + room // element_bytes)
            last = ends[fitting - 1] if fitting else 0
            if last <= first and room < CHUNK_BYTES:
                chunks.append([])
                room = CHUNK_BYTES
                continue
            if last <= first:  # an uncuttable piece gets its own chunk
                last = ends[bisect_right(ends, first)]
            chunks[-1].append(StagedRange(number, first, last))
            room = max(0, room - (last - first) * element_bytes)
            first = last
    return chunks


def slot_bytes(tensors: Iterable[tuple[int, torch.dtype]]) -> int:
    """Return the bytes that tensors of the given sizes and dtypes use in a slot."""
    return sum(round_up(numel * dtype.itemsize, _ALIGNMENT) for numel, dtype in tensors)


def take_from(slot: Tensor, tensors: Iterable[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Return consecutive flat tensors in a slot, of the given sizes and dtypes."""
    carver = Carver(slot, _ALIGNMENT)
    return [carver.take([numel], dtype) for numel, dtype in tensors]
