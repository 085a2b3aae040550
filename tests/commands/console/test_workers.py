"""Work that processes share ends with all results, or with the error of one of them."""

import os
from multiprocessing import active_children

import pytest

from moe_optim.checkpoint.files.folders import DamageError
from moe_optim.commands.console.workers import run_in_workers
from moe_optim.errors import StateError


def work(shared, item):
    if item == "dies":
        os._exit(9)
    if item == "raises":
        raise DamageError("a file", "is damaged")
    return shared + item


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("dies", "^--workers: expected processes that finish their work, got one that was killed"),
        ("raises", "^a file is damaged$"),
    ],
)
def test_one_failure_is_an_error_and_ends_all_processes(bad, message):
    before = active_children()
    got = {}
    with pytest.raises(StateError, match=message):
        for item, result in run_in_workers(work, "x", ["1", "2", bad], workers=2):
            got[item] = result
    assert got.items() <= {"1": "x1", "2": "x2"}.items()
    assert active_children() == before
