"""Tests of the CPU do not see a GPU, in none of their processes, on any machine."""

import os
import subprocess
import sys

import torch

from tests.support.ranks import run_ranks
from tests.support.training_runs.runs import REPOSITORY

COUNT = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available())"

PRETEND = """
import os, torch

torch.cuda.device_count = lambda: 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 1
torch.cuda.is_available = lambda: torch.cuda.device_count() > 0
"""
"""A sitecustomize under which torch sees a GPU, unless it is hidden."""

TESTS = """
import pytest, torch

def test_without_a_gpu():
    assert not torch.cuda.is_available()

@pytest.mark.gpu
def test_with_a_gpu():
    assert torch.cuda.is_available()

@pytest.mark.multi_gpu
def test_with_two():
    raise AssertionError

@pytest.mark.any_device
def test_with_what_is_there(pytestconfig):
    assert torch.cuda.is_available() is pytestconfig.getoption("--gpus")
"""


def look():
    return torch.cuda.device_count(), torch.cuda.is_available(), torch.cuda.is_initialized()


def test_no_process_of_these_tests_sees_a_gpu():
    """This one, one that it starts, and one that is forked with Megatron imported."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]
    assert look() == (0, False, False)
    assert run_ranks(2, look) == [(0, False, False)] * 2


def test_tests_with_and_without_gpus_run_apart(tmp_path):
    """On a machine with one GPU: each test in one of the two runs, or in both if it is for both."""
    (tmp_path / "sitecustomize.py").write_text(PRETEND)
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    del environment["CUDA_VISIBLE_DEVICES"]

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, "-q"]
        command += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        done = subprocess.run(
            [*command, *options, str(tmp_path / "test_it.py")],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1].partition(" in ")[0]

    seen = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True
    )
    assert seen.stdout.split() == ["1", "True"]
    assert run() == "2 passed, 2 skipped"
    assert run("--gpus") == "2 passed, 1 skipped, 1 deselected"
