"""Ranks of training stacks, forked from one process, and what is told of one that stops."""

import json
import os

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tools.stacks.__main__ import _beside, _stopped_alone
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


def _case(format, **seen):
    return {"recipe": "one", "format": format, "ranks": 1, **seen}


def test_a_case_fails_if_it_stops_where_stock_does_not():
    stopped = {STOPPED: "somewhere"}
    assert _stopped_alone([_case("stock"), _case("bf16", **stopped)]) == [_case("bf16", **stopped)]
    assert _stopped_alone([_case("stock", **stopped), _case("bf16", **stopped)]) == []


def test_a_record_keeps_cases_that_a_run_does_not_repeat(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"cases": [_case("bf16"), _case("stock")]}))
    new = {"commit": "abc", "cases": [_case("bf16", losses=[1.0])]}
    assert _beside(path, new) == {
        "commit": "abc",
        "cases": [_case("stock"), _case("bf16", losses=[1.0])],
    }
