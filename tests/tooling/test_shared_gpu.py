"""Several ranks on one GPU: what ``tests/support/shared_gpu`` tells each process."""

import os
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from moe_optim.environment import find_gpus
from tests.support.training_runs.runs import REPOSITORY

FOLDER = REPOSITORY / "tests" / "support" / "shared_gpu"
LOOK = "import os; print(os.environ.get('NCCL_HOSTID'), os.environ.get('LOCAL_RANK'))"


def look(**given):
    """Return what a new process has of host name and local rank."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER)} | given
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_every_rank_is_a_host_of_its_own_with_the_first_gpu():
    assert look(RANK="0", LOCAL_RANK="0") == ["rank-0", "0"]
    assert look(RANK="3", LOCAL_RANK="3") == ["rank-3", "0"]
    assert look() == ["None", "None"]


@pytest.mark.parametrize(("real", "found"), [(1, 4), (0, 0)], ids=["one GPU", "none"])
def test_who_starts_ranks_finds_a_gpu_for_each(real, found, monkeypatch):
    """All of them the one there is; and none where there is none."""
    gpu = SimpleNamespace(name="it", major=9, minor=0, total_memory=1 << 30)
    monkeypatch.setenv("RANKS_ON_A_GPU", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: real)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: gpu}.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch.cuda.device_count() > 0)
    runpy.run_path(str(FOLDER / "sitecustomize.py"))
    assert [one.name for one in find_gpus()] == ["it"] * found


def test_some_of_these_gpus_are_as_many(monkeypatch):
    """Of numbers that CUDA would not know."""
    monkeypatch.setenv("RANKS_ON_A_GPU", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: None)
    runpy.run_path(str(FOLDER / "sitecustomize.py"))
    assert torch.cuda.device_count() == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
