"""Workers on a GPU: how many there are, what each gets, and how many runs they start at a time."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import gpu_sharing
from tests.support.gpu_sharing import count_workers, places, share_places, unit_of
from tests.support.training_runs.runs import REPOSITORY

GB = 10**9


@pytest.mark.parametrize(
    ("cores", "free", "workers"),
    [
        pytest.param(16, 84 * GB, 12, id="one H100"),
        pytest.param(16, 140 * GB, 12, id="one H200: cores are fewer"),
        pytest.param(64, 84 * GB, 12, id="a GPU of four H100: memory is less"),
        pytest.param(16, 46 * GB, 4, id="48 GB"),
        pytest.param(16, 23 * GB, 1, id="24 GB: less than the largest test asks for"),
        pytest.param(2, 84 * GB, 1, id="two cores"),
    ],
)
def test_there_are_as_many_workers_as_cores_and_memory_allow(cores, free, workers):
    assert count_workers(cores, free) == workers


def test_a_unit_of_work_is_a_test_with_all_its_cases_or_a_file_that_shares_runs():
    assert unit_of("tests/gpu/test_a.py::test_b[x::y[0]-z]") == "tests/gpu/test_a.py::test_b"
    assert unit_of("tests/gpu/test_a.py::test_b") == "tests/gpu/test_a.py::test_b"
    for file in gpu_sharing.SHARING:
        assert unit_of(f"{file}::test_b[x]") == file
        assert (REPOSITORY / file).is_file()


def hold_places(count, folder, number):
    with places(count):
        there = sum(int(file.read_text()) for file in folder.glob("here*"))
        (folder / f"here{number}").write_text(str(min(count, 3)))
        (folder / f"seen{number}").write_text(str(there + min(count, 3)))
        time.sleep(0.2)
        (folder / f"here{number}").unlink()


@pytest.mark.parametrize("counts", [[1] * 6, [2] * 4, [1, 3, 2, 9, 1]], ids=str)
def test_no_more_processes_run_than_there_are_places(counts, tmp_path, monkeypatch):
    """Whoever asks for more than there are gets all of them, and all end."""
    monkeypatch.setenv(gpu_sharing.PLACES, "")
    share_places(3, tmp_path)
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=hold_places, args=(count, tmp_path, number))
        for number, count in enumerate(counts)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * len(counts)
    seen = [int(file.read_text()) for file in tmp_path.glob("seen*")]
    assert len(seen) == len(counts)
    assert max(seen) <= 3


PRETEND = """
import torch

torch.cuda.device_count = lambda: 1
torch.cuda.is_available = lambda: True
torch.cuda.mem_get_info = lambda: (28 * 10**9 + 9 * 10**9, 80 * 10**9)
"""
"""A sitecustomize under which torch sees a GPU with room for two workers."""

TESTS = """
import os, pytest

@pytest.mark.gpu
@pytest.mark.parametrize("case", range(3))
def test_first(case):
    print("worker", os.environ["PYTEST_XDIST_WORKER"], os.environ["TEST_PLACES"].split(":")[0])

@pytest.mark.gpu
@pytest.mark.parametrize("case", range(3))
def test_second(case):
    test_first(case)
"""


def test_a_run_on_a_gpu_sizes_itself(tmp_path: Path):
    """Workers and places by its memory, cases of a test together, durations at the end."""
    (tmp_path / "sitecustomize.py").write_text(PRETEND)
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    for name in ("CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER", gpu_sharing.PLACES):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, "-rP"]
    command += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "--gpus", "-n", "auto"]
    done = subprocess.run(
        [*command, "test_it.py"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cores = len(os.sched_getaffinity(0))
    workers = min(2, cores * 3 // 4)
    seen = [line for line in done.stdout.splitlines() if line.startswith("worker")]
    assert len(seen) == 6
    counts = [seen.count(line) for line in set(seen)]
    assert sorted(counts) == ([3, 3] if workers == 2 else [6])
    assert {line.split()[2] for line in seen} == {str(workers)}
    assert "slowest" in done.stdout
