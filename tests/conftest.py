"""GPUs are hidden from tests that do not use them; everything else is in ``tests/support``.

A process that has looked at a GPU cannot be forked into ranks, and the CPU runtime refuses a
machine where torch sees one. So a run of pytest either hides the GPUs from all of its processes,
or, with ``--gpus``, has the tests that use them and no others. ``make test`` runs both.
"""

import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import gpu_sharing, hypothesis_profile

hypothesis_profile.load()

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
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        torch.set_num_threads(1)
    if config.getoption("--gpus") and config.option.durations is None:
        config.option.durations = 30


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Let ``-n auto`` on GPUs be what their memory and the cores allow; elsewhere a worker a core.

    Training runs that workers start take places, of which there are as many.
    """
    if not config.getoption("--gpus") or not torch.cuda.device_count():
        return None
    free, _ = torch.cuda.mem_get_info()
    count = gpu_sharing.count_workers(len(os.sched_getaffinity(0)), free)
    folder = Path(tempfile.mkdtemp(prefix="places-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    gpu_sharing.share_places(count, folder)
    return count


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread tests on GPUs over workers by :func:`gpu_sharing.unit_of`, in the order they come."""
    if not config.getoption("--gpus"):
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return gpu_sharing.unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Give a GPU back what a test has freed: torch keeps it, and other workers miss it."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def alone() -> Iterator[None]:
    """Let no other test run that needs as much memory of a GPU as this one."""
    with gpu_sharing.alone():
        yield
        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what belongs into this run, skip what needs more GPUs than it sees, slow files first.

    The last file of a run then leaves no core without work for long. On GPUs files that share runs
    come before all others.
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
    items.sort(
        key=lambda item: (
            gpu_sharing.unit_of(item.nodeid) not in gpu_sharing.SHARING,
            item.path not in slow,
        )
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Spare every collection of garbage the tests themselves and what they import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
