"""``moe-optim bench step``: what it makes of the accounts of ranks, and whole runs on the CPU."""

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moe_optim.bench import step as bench_step
from moe_optim.bench import step_picture as bench_step_picture
from moe_optim.bench.step_figures import FIGURES, PARTS, Measured, merge, summarize, table_of
from moe_optim.cli import main as cli
from moe_optim.recipes import load_recipe

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


def test_the_table_says_how_much_processes_of_a_side_differ():
    values = {"stock": [8.0, 4.5], "plugin": [4.0, 4.25]}
    found = {
        side: [Measured(losses=("2",), values={"iteration_ms": [value]}) for value in of_side]
        for side, of_side in values.items()
    }
    work = {"recipe": "some.yaml", "format": "mxfp8", "ranks": 2}
    console = Console(file=io.StringIO(), width=100)
    console.print(table_of({**summarize(found), "workload": work, "device": "CPU"}))
    said = console.file.getvalue()
    assert "iteration, each process of stock: 8.00, 4.50" in said
    assert "iteration, each process of plug-in: 4.00, 4.25" in said


def test_losses_are_equal_only_if_all_runs_agree():
    runs = [Measured(losses=(loss,), values={}) for loss in ("2", "2", "2.00000024")]
    assert not summarize({"stock": runs[:1], "plugin": runs[1:]})["losses_equal"]


def test_too_few_iterations_are_refused(capsys):
    assert cli.main(["bench", "step", str(RECIPE), "--iterations", "5"]) == 2
    assert "--iterations, --rounds: expected at least 6" in capsys.readouterr().err


REFUSED = {
    "no data": ([], "expected a flag that says what to train on, got none"),
    "no ranks": (["--ranks", "0", "--", *MOCK], "--ranks: expected 1 or more, got 0"),
    "another machine": (["--set", "requires.sm=999"], "requires: expected more than this machine"),
    "nowhere to draw": (["--out", "/none/a.png", "--", *MOCK], "/none/a.png: expected a file"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused_before_a_rank_starts(words, message, capsys):
    assert cli.main(["bench", "step", str(RECIPE), *words]) == cli.BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_sides_run_the_same_but_for_the_plug_in(deterministic):
    """Determinism is a matter of both: the flags stand before the user's, which then win."""
    args = argparse.Namespace(
        deterministic=deterministic, iterations=6, megatron_args=["--clip-grad", "2"]
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


def test_the_help_says_what_every_key_means(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--help"])
    text = capsys.readouterr().out
    for key, figure in FIGURES.items():
        assert f"{key}: {figure.label}" in text
        assert figure.meaning in text


@pytest.fixture
def drawn(monkeypatch):
    """Every bar of a picture drawn: its row, where it begins and how long it is."""
    from matplotlib.axes import Axes

    bars, barh = [], Axes.barh

    def draw_and_keep(axes, row, width, left, **style):
        bars.append((row, left, width))
        return barh(axes, row, width, left=left, **style)

    monkeypatch.setattr(Axes, "barh", draw_and_keep)
    return bars


def test_the_picture_stacks_the_parts_of_both_sides(drawn):
    """Each bar begins where the one before ends, and the last ends with the iteration, or where
    the parts do if these, medians of other iterations, are longer; absent parts take no room."""
    parts = dict.fromkeys(PARTS, 1.0)
    sides = {
        "stock": {**parts, "iteration_ms": 10.0},
        "plugin": {**parts, "iteration_ms": 6.0, "post_processing_ms": None},
    }
    work = {"recipe": "some.yaml", "format": "mxfp8", "ranks": 2}
    report = {**sides, "workload": work, "device": "CPU", "losses_equal": True}
    assert bench_step_picture.draw(report).startswith(b"\x89PNG")
    count = len(PARTS) + 1
    rows = [drawn[:count], drawn[count : 2 * count]]
    for row, bars in enumerate(rows):
        assert [place for place, _, _ in bars] == [row] * count
        ends = [left + width for _, left, width in bars]
        assert [left for _, left, _ in bars] == [0.0, *ends[:-1]]
    assert rows[0][-1] == (0, 8.0, 2.0)
    assert rows[1][-1] == (1, 7.0, 0.0)
    assert len(drawn) == 2 * count + 2 * (count - 1)


DENSE, EXPERTS = 199_296, 1_572_864
"""Parameters of the quickstart: 2 x 256 x 128 of embeddings, 2 x 4 x 128 x 128 of attention,
2 x 8 x 128 of routers, 5 x 128 of norms; 2 layers x 8 experts x (512 x 128 + 128 x 256)."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("expert_parallel", "gathers", "changes", "bytes_per_parameter"),
    [
        (1, 1, ["moe_optim.format=mxfp8"], 2 * (1 + 1 / 32)),
        (
            2,
            2,
            [
                "moe_optim.format=nvfp4",
                "moe_optim.layout=stock",
                "megatron_args.--overlap-param-gather=false",
            ],
            1 / 2 + 1 / 256,
        ),
    ],
    ids=["overlapped, one optimizer", "in the step, two optimizers"],
)
def test_both_sides_train_and_are_compared(
    expert_parallel, gathers, changes, bytes_per_parameter, tmp_path, capsys
):
    """On the CPU over gloo: every figure of both sides and their ratio. Bytes follow from sizes;
    each of two optimizers lets Megatron gather everything, and ours what is its own."""
    report, picture = tmp_path / "step.json", tmp_path / "step.png"
    options = ["--iterations", "6", "--rounds", "1", "--ranks", "2", "--deterministic"]
    options += ["--set", *changes, "--json", str(report), "--out", str(picture)]
    megatron = ["--expert-model-parallel-size", str(expert_parallel), *MOCK]
    assert cli.main(["bench", "step", str(RECIPE), *options, "--", *megatron]) == 0
    found = json.loads(report.read_text())
    assert found.keys() >= {"command", "commit", "device", "workload", "stock", "plugin", "ratio"}
    for side in ("stock", "plugin"):
        absent = [key for key, value in found[side].items() if value is None]
        assert absent == ["peak_bytes"]
        assert found[side]["optimizer_ms"] > found[side]["inner_step_ms"] > 0
        assert found[side]["optimizer_host_ms"] > 0
        assert len(found["losses"][side][0]) == 6
    experts = EXPERTS // expert_parallel
    assert found["stock"]["gathered_bytes"] == gathers * 2 * (DENSE + experts)
    wire = experts * bytes_per_parameter
    assert found["plugin"]["gathered_bytes"] == 2 * DENSE + wire
    assert (found["plugin"]["reduced_bytes"] > 0) == ("moe_optim.layout=stock" in changes)
    assert found["workload"]["deterministic"]
    assert picture.stat().st_size > 10_000
    assert "plug-in" in capsys.readouterr().out


@pytest.mark.slow
def test_both_sides_are_measured_where_weights_are_quantized(tmp_path):
    """Every part of a step on the CPU, of stock's experts in bf16 and of ours in MXFP8."""
    path = tmp_path / "step.json"
    options = ["--rounds", "1", "--iterations", "6", "--ranks", "1", "--json", str(path)]
    assert cli.main(["bench", "step", str(RECIPE), *options, "--", *MOCK]) == 0
    report = json.loads(path.read_text())
    for side in ("stock", "plugin"):
        assert [len(losses) for losses in report["losses"][side]] == [6]
        missing = {figure for figure, value in report[side].items() if value is None}
        assert missing == {"peak_bytes"}, side
    assert report["plugin"]["requantize_ms"] > 0
