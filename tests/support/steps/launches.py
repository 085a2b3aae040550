"""Launches as tests watch them on a GPU."""

from collections.abc import Callable

import torch


def assert_neither_allocates_nor_waits(launch: Callable[[], object]) -> None:
    """Launch once to compile, then again under watch. Needs a GPU."""
    launch()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for key in ("allocation.all.allocated", "segment.all.allocated"):
        assert after[key] == before[key]
