"""Moving bytes with one thread of torch's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch copy with one thread inside.

    Memory and disks are what a conversion waits for. More threads add nothing to that, and where
    other processes want their cores, copies of a row of experts wait for the slowest of them: 50
    times as long on two busy cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
