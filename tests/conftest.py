"""GPUs are hidden from tests that do not use them; everything else is in ``tests/support``.

A process that has looked at a GPU cannot be forked into ranks, and the CPU runtime refuses a
machine where torch sees one. So a run of pytest either hides the GPUs from all of its processes,
or, with ``--gpus``, has the tests that use them and no others. ``make test`` runs both.
"""

import gc
import os

import pytest
import torch

GPUS_OF_MARKS = {"gpu": 1, "multi_gpu": 2, "four_gpus": 4, "any_device": 0}
"""Marks of tests that use GPUs, and how many they need."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpus``."""
    parser.addoption(
        "--gpus",
        action="store_true",
        help="run the tests that use GPUs, and no others; without it GPUs are hidden from all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs before any test module is imported, and share the cores; children inherit it."""
    if not config.getoption("--gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker a core: more threads only wait
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what belongs into this run, skip what needs more GPUs than it sees, slow files first.

    The last file of a run then leaves no core without work for long.
    """
    gpus = torch.cuda.device_count()
    others = []
    for item in items:
        needed = [count for mark, count in GPUS_OF_MARKS.items() if item.get_closest_marker(mark)]
        if config.getoption("--gpus") and not needed:
            others.append(item)
        elif max(needed, default=0) > gpus:
            reason = f"needs {max(needed)} GPUs, sees {gpus}; pytest --gpus does not hide them"
            item.add_marker(pytest.mark.skip(reason=reason))
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the tests themselves and what they import."""
    gc.freeze()
