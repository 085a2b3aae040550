"""Tests of the CPU see no GPU, in none of their processes, on any machine."""

import os
import subprocess
import sys

import torch

from tests.support.ranks import run_ranks

COUNT = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available())"


def look():
    return torch.cuda.device_count(), torch.cuda.is_available(), torch.cuda.is_initialized()


def test_no_process_of_these_tests_sees_a_gpu():
    """This one, one that it starts, and ranks that are forked with Megatron imported."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]
    assert look() == (0, False, False)
    assert run_ranks(2, look) == [(0, False, False)] * 2
