"""Launches as tests make them: watched on a GPU, interpreted without one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


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


def interpreted(module: str) -> subprocess.CompletedProcess[str]:
    """Return what kernels did in a process of their own, where Triton interprets them."""
    return subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True)
