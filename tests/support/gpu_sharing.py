"""How workers of one run share a GPU: as many as its memory and the cores allow.

A worker has a context of its own and takes part in launches of training runs, which have theirs.
Tests that need more take turns, see :func:`alone`.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

WORKER_BYTES = int(4.5e9)
"""Of one worker with its tests, and of one process of a training run."""
ALONE_BYTES = 28 * 10**9
"""Of the largest test: steps of a model of 1.3e9 parameters."""
PLACES = "TEST_PLACES"
"""Environment variable: ``COUNT:FOLDER``, of training processes at a time and of their locks."""
SHARING = (
    "tests/gpu/test_coexistence_on_gpu.py",
    "tests/gpu/test_offload_on_gpu.py",
    "tests/weights/te/test_modules.py",
)
"""Files whose tests look at the same runs: each stays with one worker, and comes first."""


def count_workers(cores: int, free_bytes: int) -> int:
    """Return how many workers fit: three for four cores, since launches leave some to be waited
    for, and beside the largest test."""
    by_memory = (free_bytes - ALONE_BYTES) // WORKER_BYTES
    return max(1, min(cores * 3 // 4, by_memory))


def unit_of(nodeid: str) -> str:
    """Return what goes to one worker: a file that shares runs, or else a test in all its cases."""
    file, _, test = nodeid.partition("::")
    return file if file in SHARING else f"{file}::{test.partition('[')[0]}"


def share_places(count: int, folder: Path) -> None:
    """Let processes that start from now on wait for each other in :func:`places`."""
    os.environ[PLACES] = f"{count}:{folder}"


@contextmanager
def places(count: int) -> Iterator[None]:
    """Wait until so many training processes may start, and take their places meanwhile.

    All of them at once: whoever collects places keeps others from collecting, so that nobody waits
    for a place of somebody who waits. Without :func:`share_places` nothing waits.
    """
    total, _, folder = os.environ.get(PLACES, "").partition(":")
    if not total:
        yield
        return
    with ExitStack() as taken:
        with _locked(Path(folder) / "collecting"):
            for _ in range(min(count, int(total))):
                taken.enter_context(_any_place(Path(folder), int(total)))
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other test needs :data:`ALONE_BYTES`."""
    _, _, folder = os.environ.get(PLACES, "").partition(":")
    if not folder:
        yield
        return
    with _locked(Path(folder) / "alone"):
        yield


@contextmanager
def _any_place(folder: Path, total: int) -> Iterator[None]:
    files = [(folder / f"place{number}").open("w") for number in range(total)]
    while not (mine := next((file for file in files if _try_lock(file)), None)):
        time.sleep(0.05)
    for file in files:
        if file is not mine:
            file.close()
    with mine:
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:  # closing it unlocks, also when the process is killed
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
