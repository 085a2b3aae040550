"""Runs independent items of work in processes, with the same results for any number of them."""

import argparse
import os
import resource
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from typing import Any

from moe_optim.errors import MoEOptimError, StateError

_MOST = 8  # number of processes that disks and memory of a machine feed, by default
BYTES_OF_EACH = 256 * 2**20  # bytes for which it pays to start another process, which imports torch

_held: list[Any] = []  # in a worker: the function and what all of its items share


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--workers``."""
    text = (
        "processes that share the work (default: one for each 256 MiB, at most the number of "
        f"cores and {_MOST})"
    )
    parser.add_argument("--workers", type=number_above_zero, metavar="N", help=text)


def number_of_workers(given: int | None, nbytes: int) -> int:
    """Return the number of processes for ``nbytes`` of work; ``given`` is that of the option."""
    cores = len(os.sched_getaffinity(0))
    return given or max(1, min(_MOST, cores, nbytes // BYTES_OF_EACH))


def run_in_workers[Shared, Item, Result](
    work: Callable[[Shared, Item], Result], shared: Shared, items: Collection[Item], *, workers: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the result of ``work(shared, item)``, in the order in which they end.

    Every process receives ``shared`` once; ``work`` is a function of a module. With one worker or
    item, this process does the work. If a process raises, dies or is interrupted, all others are
    ended before this returns; StateError if one died.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        for item in items:
            yield item, work(shared, item)
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start, initargs=(work, shared)
    )
    try:
        # processes that start now inherit the mask: on SIGINT their parent ends them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            running = {pool.submit(_run, item): item for item in items}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        raise StateError(
            "--workers: expected processes that finish their work, got one that was killed, "
            "perhaps for lack of memory. Give fewer."
        ) from None
    finally:
        for child in set(active_children()) - others:
            child.terminate()
        pool.shutdown(cancel_futures=True)


def peak_memory() -> int:
    """Return the peak memory in bytes of this process or of a larger one that it waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return 1024 * max(usage.ru_maxrss for usage in both)


def _start(*held: Any) -> None:
    import torch  # slow

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _held[:] = held


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _run(item: Any) -> Any:
    work, shared = _held
    try:
        return work(shared, item)
    except MoEOptimError as error:  # those with other arguments cannot travel
        kind = StateError if isinstance(error, StateError) else type(error)
        raise kind(str(error)) from None


def whole_number(text: str) -> int:
    """Parse a nonnegative integer option; an argparse ``type``."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected 0 or a positive integer, got '{text}'")
    return int(text)


def number_above_zero(text: str) -> int:
    """Parse a positive integer option; an argparse ``type``."""
    if not whole_number(text):
        raise argparse.ArgumentTypeError("expected a positive integer, got 0")
    return int(text)
