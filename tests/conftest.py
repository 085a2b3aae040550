"""Marks decide what can run here; everything else is in ``tests/support``."""

import gc

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than this machine has, saying so."""
    gpus = torch.cuda.device_count()
    for item in items:
        for mark, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(mark) and gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {gpus}"))


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the tests themselves and what they import."""
    gc.freeze()
