"""What `tools.upstream.flags` starts, and what it makes of a log."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tools.upstream import flags
from tools.upstream.flags import PAIRS, Asked, Pair, is_equal, plugin, stock

RESULTS = Path(__file__).parents[2] / "recipes" / "results"
RECORDED = json.loads((RESULTS / "flags-2x-h200.json").read_text())
ON_TWO_GPUS = Asked(folder=Path(), ranks=2, cpu=False)


def test_what_is_recorded_is_what_would_be_started():
    """Every pair, by the same commands: a record of others would show something else."""
    assert [pair["with"] for pair in RECORDED["pairs"]] == list(PAIRS)
    for pair, meant in zip(RECORDED["pairs"], PAIRS.values(), strict=True):
        for side, name in zip(meant.sides, pair["of"], strict=True):
            recorded = RECORDED["runs"][name]["command"]
            assert recorded == shlex.join(ON_TWO_GPUS.command(side))


LOG = """
 [2026-11-24] iteration        1/       2 | lm loss: 7.058185E+00 | grad norm: 2.199 | skipped: 0 |
 validation loss at iteration 1 | lm loss value: 5.655294E+00 | lm loss PPL: 2.857e+02 |
 [2026-11-24] iteration        2/       2 | lm loss: nan | grad norm: inf | skipped: 0 |
 validation loss at iteration 2 on test set | lm loss value: 5.6E+00 | lm loss PPL: 2.7e+02 |
"""


def test_losses_norms_and_evaluations_are_read_from_a_log():
    found = {what: place.findall(LOG) for what, place in flags.PRINTED.items()}
    assert found == {
        "losses": ["7.058185E+00", "nan"],
        "grad_norms": ["2.199", "inf"],
        "validation_losses": ["5.655294E+00", "5.6E+00"],
    }


@pytest.mark.parametrize("what", [*flags.PRINTED, "exit", "nothing"])
def test_one_digit_makes_a_pair_differ(what):
    pair = Pair(stock(), plugin())
    figures = {name: ["1.0", "2.0"] for name in flags.PRINTED} | {"exit": 0}
    runs = {side.name: dict(figures) for side in pair.sides}
    if what in figures:
        runs[pair.turned_on.name][what] = ["1.0", "2.1"] if what in flags.PRINTED else 1
    assert is_equal(runs, pair) is (what == "nothing")


def test_a_run_that_failed_equals_nothing():
    pair = Pair(stock(), plugin())
    assert not is_equal({side.name: {"losses": []} for side in pair.sides}, pair)


def test_runs_that_have_printed_no_evaluations_equal_nothing():
    pair = Pair(stock(), plugin())
    figures = {name: ["1.0"] for name in flags.PRINTED} | {"validation_losses": []}
    assert not is_equal({side.name: figures for side in pair.sides}, pair)


def test_on_a_cpu_no_pair_needs_a_gpu():
    """Commands have no word of Transformer Engine, and stock's start by what sets the CPU up."""
    pairs = flags.chosen([], cpu=True)
    assert set(pairs) < set(PAIRS) and pairs
    for side in (side for pair in pairs.values() for side in pair.sides):
        words = replace(ON_TWO_GPUS, cpu=True).command(side)
        assert not {"transformer_engine", "--fp8-param-gather", "--moe-grouped-gemm"} & set(words)
        assert words[:6] == ["torchrun", "--nproc-per-node", "2", "--no-python", "moe-optim", "run"]
