"""Ranks of training stacks, forked from one process, and what is told of one that stops."""

import os

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tools.stacks.ranks import STOPPED
from tools.stacks.ranks import run_ranks as fork_ranks


def _sum_of_ranks(name):
    if not name:
        raise KeyError("a stack stops here")
    print("said by", os.environ["RANK"])
    dist.init_process_group("gloo")
    mine = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(mine)
    return {name: mine.item()}


def _fork(folder):
    return [fork_ranks(2, folder / name, _sum_of_ranks, name) for name in ("sum", "")]


def test_ranks_give_the_first_ones_result_or_where_they_stopped(tmp_path):
    ((seen, stopped),) = run_ranks(1, _fork, tmp_path)
    assert seen == {"sum": 3}
    place, _, reason = stopped[STOPPED].partition(": ")
    assert place.startswith("tests/tooling/test_stacks.py:")
    assert reason == "KeyError: 'a stack stops here'"
    assert (tmp_path / "sum/1.log").read_text() == "said by 1\n"
