"""What the ranks of a test say when they fail."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks


def meet():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    return dist.get_rank()


def reduce_for_long():
    kept = torch.ones(2**28)  # 1 GiB: its process takes a while to end
    meet()
    while True:
        dist.all_reduce(kept[:4])


def fall_asleep():
    if meet() == 1:
        time.sleep(600)


def fail():
    if meet() == 1:
        raise ValueError("expert 3 has no weight")


def leave():
    if meet() == 1:
        os._exit(7)


def failure_of(function, **options):
    with pytest.raises(AssertionError) as error:
        run_ranks(2, function, **options)
    return str(error.value)


def test_ranks_that_take_too_long_are_ended_together():
    """One after the other, a healthy run had ended in gloo's "Connection closed by peer"."""
    said = failure_of(reduce_for_long, timeout_s=3)
    assert said.startswith("ranks [0, 1] did not end within 3 s, stacks at that time below in red")
    assert said.count("in reduce_for_long\n  File") == 2
    assert "peer" not in said


def test_a_rank_that_hangs_says_where():
    """The other has ended, and is not mentioned."""
    said = failure_of(fall_asleep, timeout_s=3)
    assert said.startswith("ranks [1] did not end within 3 s")
    assert "in fall_asleep" in said
    assert "--- rank 0" not in said


def test_a_rank_that_fails_shows_its_traceback():
    said = failure_of(fail)
    assert said.startswith("ranks [1] failed in fail\n--- rank 1, exit code 1\n")
    assert "ValueError: expert 3 has no weight" in said


def test_a_rank_that_leaves_is_named_with_its_exit_code():
    assert failure_of(leave).startswith("ranks [1] failed in leave\n--- rank 1, exit code 7\n")


def test_the_results_come_in_the_order_of_ranks():
    assert run_ranks(2, meet) == [0, 1]
