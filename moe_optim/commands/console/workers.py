"""Runs independent items of work in processes, with the same results for any number of them."""

import argparse
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import Any

from moe_optim.errors import MoEOptimError, StateError

_MOST = 8
"""Number of processes that disks and memory of a machine feed, by default."""
_BYTES_OF_EACH = 256 * 2**20
"""Bytes for which it pays to start another process, which imports torch."""

_held: list[Any] = []  # in a worker: the function and what all of its items share


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--workers``."""
    parser.add_argument(
        "--workers",
        type=number_above_zero,
        metavar="N",
        help="processes that share the work (default: one for each 256 MiB, at most the number of "
        f"cores and {_MOST})",
    )


def number_of_workers(given: int | None, nbytes: int) -> int:
    """Return the number of processes for ``nbytes`` of work; ``given`` is that of the option."""
    cores = len(os.sched_getaffinity(0))
    return given or max(1, min(_MOST, cores, nbytes // _BYTES_OF_EACH))


def run_in_workers[Shared, Item, Result](
    work: Callable[[Shared, Item], Result],
    shared: Shared,
    items: Iterable[Item],
    *,
    workers: int,
    name: Callable[[Item], str],
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the result of ``work(shared, item)``, in the order in which they end.

    Each process has one item at a time. If one raises, dies or is interrupted, all others are ended
    before this returns.

    Args:
        work: function of a module.
        shared: argument that every process receives once.
        items: work, taken when a process is free.
        workers: number of processes; 1 for this one.
        name: function that names an item, for errors.

    Raises:
        StateError: a process died.
    """
    if workers == 1:
        for item in items:
            yield item, work(shared, item)
        return
    spawn, before = get_context("spawn"), set(active_children())
    idle = [
        ProcessPoolExecutor(1, mp_context=spawn, initializer=_start, initargs=(work, shared))
        for _ in range(workers)
    ]
    pools, waiting = list(idle), iter(items)
    running: dict[Future[Result], tuple[ProcessPoolExecutor, Item]] = {}
    try:
        while True:
            for pool, item in zip(idle, waiting, strict=False):
                with _deferred_interrupts():
                    running[pool.submit(_run, item)] = pool, item
            if not running:
                break
            idle = []
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                pool, item = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    raise StateError(
                        f"{name(item)}: expected a worker process to finish it, got one that was "
                        "killed, perhaps as memory is short. Give fewer --workers."
                    ) from None
                idle.append(pool)
                yield item, result
    finally:
        for child in set(active_children()) - before:
            child.terminate()
        for pool in pools:
            pool.shutdown()


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Block SIGINT, also in processes that start here: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        raise argparse.ArgumentTypeError(f"expected a whole number, got '{text}'")
    return int(text)


def number_above_zero(text: str) -> int:
    """Parse a positive integer option; an argparse ``type``."""
    if not whole_number(text):
        raise argparse.ArgumentTypeError("expected a number above 0, got 0")
    return int(text)
