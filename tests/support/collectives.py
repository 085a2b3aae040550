"""A stretch of code in which no rank may communicate."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

COLLECTIVES = [
    name
    for name in distributed_c10d.__all__
    if any(word in name for word in ("reduce", "gather", "broadcast", "scatter", "send", "recv"))
    or name in {"barrier", "all_to_all", "all_to_all_single", "monitored_barrier"}
]


@contextmanager
def no_collectives() -> Iterator[None]:
    """Raise wherever a rank communicates."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a rank communicates")

    refused = dict.fromkeys(COLLECTIVES, refuse)
    with mock.patch.multiple(dist, **refused), mock.patch.multiple(distributed_c10d, **refused):
        yield
