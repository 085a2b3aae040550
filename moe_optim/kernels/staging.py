"""Host states in a step: copied to the device in chunks, stepped there, and copied back.

While kernels step a chunk, copy engines move the next one in and the previous one out.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from weakref import WeakSet

import torch
from torch import Tensor

from moe_optim.formats import round_up

SLOTS = 3
CHUNK_BYTES = 48 << 20
"""Bytes of masters and moments of a chunk; more only where what cannot be cut is larger."""
SMALLEST = 1 << 16
"""Elements of a shard. Kernels step smaller shards in host memory: a copy costs more."""
_ALIGNMENT = 256  # bytes between two tensors of a slot

Copies = Sequence[tuple[Tensor, Tensor]]
"""Tensors of the host, and their places on the device."""


class Stage:
    """Memory of the device that chunks pass through, and the streams that copy them.

    Args:
        device: device that steps them.
        slot_bytes: size of each of ``SLOTS`` slots of memory.
    """

    _stages: "WeakSet[Stage]" = WeakSet()

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self._device = device
        self.slots = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)
        ]
        self._turns = cycle(range(SLOTS))
        self._depth = 0
        self._left: dict[int, torch.cuda.Event] = {}  # slot -> when its last chunk had left
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @classmethod
    def of(cls, device: torch.device, slot_bytes: int) -> "Stage":
        """Return a stage for chunks of this size, shared with others on the device if possible.

        Steps on one stream follow each other, and so may use the same memory.
        """
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
        """Return a context for :meth:`run`, which may be nested to let several tables overlap.

        Copies start after the work that was queued before. At the end of the outermost context the
        current stream waits for all chunks; the host does not wait.
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
        """Copy a chunk in, step it and copy it back, in an opened stage.

        Args:
            copies: tensors of the host, and their places in the slot.
            slot: number of the slot.
            step: function that launches the step of the chunk on the current stream.
        """
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
        """Have the current stream wait until all chunks are back on the host."""
        if self._streams is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[1])


@dataclass(frozen=True, slots=True)
class StagedRange:
    """Part of a shard in one chunk."""

    shard: int
    """Number of the shard."""
    first: int
    """First element, counted in the shard."""
    last: int
    """One past the last element."""


def pack(shards: Iterable[tuple[Sequence[int], int]]) -> list[list[StagedRange]]:
    """Divide shards into chunks, in their order, and cut them only where allowed.

    Args:
        shards: allowed ends of pieces, ascending, with the end of the shard; and bytes of an
            element, master and moments together.
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
            if last <= first:  # what cannot be cut has a chunk of its own
                last = ends[bisect_right(ends, first)]
            chunks[-1].append(StagedRange(number, first, last))
            room = max(0, room - (last - first) * element_bytes)
            first = last
    return chunks


def slot_bytes(tensors: Iterable[tuple[int, torch.dtype]]) -> int:
    """Return the bytes that tensors of these elements and dtypes take in a slot."""
    return sum(round_up(numel * dtype.itemsize, _ALIGNMENT) for numel, dtype in tensors)


def take_from(slot: Tensor, tensors: Iterable[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Return flat tensors side by side in a slot."""
    sizes = [(numel * dtype.itemsize, dtype) for numel, dtype in tensors]
    starts = [0]
    for nbytes, _ in sizes:
        starts.append(starts[-1] + round_up(nbytes, _ALIGNMENT))
    return [
        slot[start : start + nbytes].view(dtype)
        for (start, _), (nbytes, dtype) in zip(pairwise(starts), sizes, strict=True)
    ]
