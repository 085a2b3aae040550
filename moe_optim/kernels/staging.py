"""States of the host on their way through a step: to the device in chunks, stepped, and back.

Copy engines move a chunk in while kernels step the one before it, and while the one before that
moves out: as many chunks are on the device at a time.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from weakref import WeakSet

import torch
from torch import Tensor

SLOTS = 3
CHUNK_BYTES = 48 << 20
"""Of masters and moments together; more only where something that cannot be cut is larger."""
SMALLEST = 1 << 16
"""Elements of a shard. Kernels step smaller ones on the host: a copy of its own costs more."""
_ALIGNMENT = 256  # bytes between two tensors of a slot

Copies = Sequence[tuple[Tensor, Tensor]]
"""Tensors of the host, and where on the device they go and come from."""


class Stage:
    """Memory of the device that chunks pass through, and the streams that move them.

    Args:
        device: that steps them.
        slot_bytes: of each of ``SLOTS`` pieces of memory.
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
        """Return a stage for chunks of this size, the one that others on the device have if it can.

        Steps of one stream follow each other, and so may use the same memory.
        """
        for stage in cls._stages:
            if stage._device == device and stage.slots[0].numel() >= slot_bytes:
                return stage
        stage = cls(device, slot_bytes)
        cls._stages.add(stage)
        return stage

    def next_slot(self) -> int:
        """Return the slot of the next chunk: neighbours have different ones."""
        return next(self._turns)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let chunks through in a block, those of several runs on each other's heels.

        They leave the host when all that was started before has been done. At the end of the
        outermost block the current stream waits until they are back, the host for nothing.
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
        """Take a chunk through, in an opened stage.

        Args:
            copies: what goes into the slot and comes from it.
            slot: its number.
            step: launches what steps the chunk on the current stream.
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
class Piece:
    """A part of a shard that is in one chunk."""

    shard: int
    """Its number."""
    first: int
    """Its first element, counted in the shard."""
    last: int
    """One past its last."""


def pack(shards: Iterable[tuple[Sequence[int], int]]) -> list[list[Piece]]:
    """Divide shards into chunks, in their order, and cut none where it must not be.

    Args:
        shards: for each where it may be cut, ascending, its end included; and the bytes of an
            element, master and moments together.
    """
    chunks: list[list[Piece]] = []
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
            chunks[-1].append(Piece(number, first, last))
            room = max(0, room - (last - first) * element_bytes)
            first = last
    return chunks


def slot_bytes(tensors: Iterable[tuple[int, torch.dtype]]) -> int:
    """Return how much of a slot tensors take, given their elements and dtypes."""
    return sum(_padded(numel * dtype.itemsize) for numel, dtype in tensors)


def take_from(slot: Tensor, tensors: Iterable[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Return flat tensors side by side in a slot."""
    sizes = [(numel * dtype.itemsize, dtype) for numel, dtype in tensors]
    starts = [0]
    for nbytes, _ in sizes:
        starts.append(starts[-1] + _padded(nbytes))
    return [
        slot[start : start + nbytes].view(dtype)
        for (start, _), (nbytes, dtype) in zip(pairwise(starts), sizes, strict=True)
    ]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
