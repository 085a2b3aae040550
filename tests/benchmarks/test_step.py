"""``python -m benchmarks step``: what it makes of ranks' accounts, and whole runs on the CPU."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmark
from benchmarks import step as bench_step
from benchmarks.step_figures import FIGURES, Measured, merge, summarize
from moe_optim.config.recipes import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]


def iteration(kind, ms=None, nbytes=None, loss=None):
    return {"kind": kind, "ms": ms or {}, "bytes": nbytes or {}, "loss": loss}


def test_figures_are_those_of_the_slowest_rank_after_the_warm_up():
    """Memory is that of the worst rank, other bytes are rank 0's; some ranks have no loss, some
    not every part."""
    first = [
        iteration("warm-up", {"iteration": 900}, {"gathered": 0, "peak": 9}),
        iteration("plain", {"iteration": 7}, {"gathered": 5, "peak": 10}),
        iteration("parts", {"gather": 1, "inner_step": 4}, {"gathered": 6, "peak": 12}),
    ]
    last = [
        iteration("warm-up", {"iteration": 900}, {"gathered": 1, "peak": 9}, "2.5"),
        iteration("plain", {"iteration": 8}, {"gathered": 2, "peak": 11}, "2.25"),
        iteration("parts", {"gather": 3}, {"gathered": 3, "peak": 11}, "2"),
    ]
    measured = merge([first, last])
    assert measured.losses == ("2.5", "2.25", "2")
    assert measured.values == {
        "iteration_ms": [8],
        "gather_ms": [3],
        "inner_step_ms": [4],
        "gathered_bytes": [5, 6],
        "peak_bytes": [11, 12],
    }


def test_a_report_has_every_key_of_both_sides_and_their_ratio():
    """Medians over the iterations of all processes, and of each; None, and no ratio, where a side
    has none."""
    stock = [{"iteration_ms": [8.0, 4.0], "reduced_bytes": [0]}, {"iteration_ms": [5.0]}]
    plugin = [{"iteration_ms": [4.0], "reduced_bytes": [3], "gather_ms": [1.0]}] * 2
    found = {
        "stock": [Measured(losses=("2",), values=values) for values in stock],
        "plugin": [Measured(losses=("2",), values=values) for values in plugin],
    }
    report = summarize(found)
    keys = list(FIGURES)
    assert [list(report[side]) for side in ("stock", "plugin", "ratio")] == [keys, keys, keys]
    some = ("iteration_ms", "reduced_bytes", "gather_ms")
    assert [report["stock"][key] for key in some] == [5.0, 0, None]
    assert [report["plugin"][key] for key in some] == [4.0, 3, 1.0]
    assert [report["ratio"][key] for key in some] == [0.8, None, None]
    each = {side: [run["iteration_ms"] for run in report["processes"][side]] for side in found}
    assert each == {"stock": [6.0, 5.0], "plugin": [4.0, 4.0]}
    assert report["losses_equal"]
    assert report["losses"] == {"stock": [["2"], ["2"]], "plugin": [["2"], ["2"]]}


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_sides_run_the_same_but_for_the_plug_in(deterministic):
    """Determinism is a matter of both: the flags stand before the user's, which then win."""
    args = argparse.Namespace(
        against="stock",
        deterministic=deterministic,
        iterations=6,
        optimizer=None,
        megatron_args=["--clip-grad", "2"],
    )
    recipe = load_recipe(RECIPE, [])
    stock, plugin = (bench_step.megatron_argv(args, recipe, side) for side in ("stock", "plugin"))
    assert plugin[: len(stock)] == stock
    assert plugin[len(stock)] == "--use-moe-grouped-optim"
    flags = ["--deterministic-mode", "--clip-grad", "0"] if deterministic else []
    assert stock[len(recipe.megatron_argv()) :][: len(flags) + 2] == [*flags, "--clip-grad", "2"]
    assert bench_step.environment(args) == (
        {
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NCCL_ALGO": "Ring",
        }
        if deterministic
        else {}
    )


DENSE, EXPERTS = 199_552, 1_572_864
"""Parameters of the quickstart: 2 x 256 x 128 of embeddings, 2 x 4 x 128 x 128 of attention,
2 x 8 x 128 of routers, 5 x 128 of norms, 2 x 2 x 32 of norms of queries and keys, each aligned to
64; 2 layers x 8 experts x (512 x 128 + 128 x 256)."""


@pytest.mark.extended
def test_both_sides_train_and_are_compared(tmp_path, capsys):
    """On the CPU over gloo: every figure of both sides and their ratio. Bytes follow from sizes;
    each of two optimizers lets Megatron gather everything, and ours what is its own."""
    report, picture = tmp_path / "step.json", tmp_path / "step.png"
    changes = ["moe_optim.format=nvfp4", "moe_optim.layout=stock"]
    changes += ["megatron_args.--overlap-param-gather=false"]
    options = ["--iterations", "6", "--rounds", "1", "--ranks", "2", "--deterministic"]
    options += ["--set", *changes, "--json", str(report), "--out", str(picture)]
    megatron = ["--expert-model-parallel-size", "2", *MOCK]
    assert benchmark.main(["step", str(RECIPE), *options, "--", *megatron]) == 0
    found = json.loads(report.read_text())
    for side in ("stock", "plugin"):
        absent = [key for key, value in found[side].items() if value is None]
        assert absent == ["peak_bytes"]
        assert found[side]["optimizer_ms"] > found[side]["inner_step_ms"] > 0
        assert found[side]["optimizer_host_ms"] > 0
        assert len(found["losses"][side][0]) == 6
    experts = EXPERTS // 2
    assert found["stock"]["gathered_bytes"] == 2 * 2 * (DENSE + experts)
    assert found["plugin"]["gathered_bytes"] == 2 * DENSE + experts * (1 / 2 + 1 / 256)
    assert found["plugin"]["reduced_bytes"] > 0 and found["workload"]["deterministic"]
    assert picture.stat().st_size > 10_000
    assert "plug-in" in capsys.readouterr().out
