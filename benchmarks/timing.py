"""Timing for benchmarks: device medians, host time, memory and copy speed."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

REPEATS = 15
HOST_REPEATS = 100  # host times are noisier than device times
WARM_UP = 3
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
HEAD_START = 2_000_000
"""GPU cycles of delay before each repetition, 1 ms on an H100: launches are queued by then, even
after work that kept the host busy and the GPU idle."""

Work = Callable[[], object]


class Mark:
    """A time stamp: of the current stream on a GPU, of the host on a CPU."""

    def __init__(self, device: str) -> None:
        """Queue an asynchronous time stamp on ``cuda``; read the clock on ``cpu``."""
        self._time = time.perf_counter()
        self._event: Any = None
        if device == "cuda":
            import torch

            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def ms_since(self, earlier: "Mark") -> float:
        """Return the milliseconds since ``earlier``; a GPU must have passed both marks."""
        if self._event is None:
            return 1e3 * (self._time - earlier._time)
        return float(earlier._event.elapsed_time(self._event))


def nothing() -> None:
    """Restore nothing between repetitions."""


def median_ms(
    works: Sequence[Work], device: str, restore: Work = nothing, repeats: int | None = None
) -> list[float]:
    """Return the median time of each work in ms. They alternate, to share clock conditions.

    ``device`` is ``cuda`` or ``cpu``; ``restore`` is called before each repetition, untimed.
    ``repeats`` defaults to ``REPEATS``.
    """
    marks: list[list[tuple[Mark, Mark]]] = [[] for _ in works]
    # queue all repetitions before synchronizing
    for _ in range(WARM_UP + (REPEATS if repeats is None else repeats)):
        for work, own in zip(works, marks, strict=True):
            restore()
            _hold_back(device)
            start = Mark(device)
            work()
            own.append((start, Mark(device)))
    wait(device)
    return [statistics.median(end.ms_since(start) for start, end in own[WARM_UP:]) for own in marks]


def median_part_ms(
    parts: Sequence[tuple[str, Work]], device: str, repeats: int | None = None
) -> dict[str, float]:
    """Return the median time of each part of a work in ms, within the whole of it.

    ``parts`` are names and calls in their order; calls of one name are added up. ``repeats``
    defaults to ``REPEATS``.
    """
    marks: list[list[Mark]] = []
    for _ in range(WARM_UP + (REPEATS if repeats is None else repeats)):
        _hold_back(device)
        marks.append([Mark(device)])
        for _, work in parts:
            work()
            marks[-1].append(Mark(device))
    wait(device)
    times: dict[str, list[float]] = {name: [0.0] * len(marks) for name, _ in parts}
    for number, own in enumerate(marks):
        for (name, _), start, end in zip(parts, own, own[1:], strict=False):
            times[name][number] += end.ms_since(start)
    return {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}


def host_us(work: Work, device: str, restore: Work = nothing, repeats: int | None = None) -> float:
    """Return the median time of a call in us, starting with an idle device.

    ``restore`` is called before each repetition, untimed. ``repeats`` defaults to that of the
    device.
    """
    times = []
    for _ in range(WARM_UP + (repeats or (HOST_REPEATS if device == "cuda" else REPEATS))):
        restore()
        wait(device)
        began = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times[WARM_UP:])


def copy_bytes_per_ms(device: str) -> float:
    """Return the speed of a plain copy, in bytes read plus written per ms."""
    import torch

    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (time_ms,) = median_ms([lambda: target.copy_(source)], device)
    return 2 * source.numel() / time_ms


def temporary_bytes(work: Work, device: str) -> int | None:
    """Return the peak allocation of a call in bytes; None on a CPU."""
    import torch

    if device != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - resident


def release(device: str) -> None:
    """Return unreferenced memory to the device."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _hold_back(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda._sleep(HEAD_START)


def wait(device: str) -> None:
    """Wait until a GPU has finished its queued work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
