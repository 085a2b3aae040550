"""``python -m benchmarks step``: what it makes of ranks' accounts, and whole runs on the CPU."""

import argparse
import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import __main__ as benchmark
from benchmarks import step as bench_step
from benchmarks import step_picture as bench_step_picture
from benchmarks.step_figures import FIGURES, PARTS, Measured, merge, summarize, table_of, title_of
from moe_optim.commands.cli import main as cli
from moe_optim.commands.train import launcher
from moe_optim.commands.train.launcher import LaunchResult, RankFailure
from moe_optim.commands.train.progress import TrainingState
from moe_optim.config.recipes import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
WORK = {
    "recipe": "some.yaml",
    "format": "mxfp8",
    "ranks": 2,
    "portable_experts": False,
    "clip_grad": 0.0,
    "deterministic": True,
}
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
    work = {**WORK, "format": "mxfp8"}
    console = Console(file=io.StringIO(), width=100)
    console.print(table_of({**summarize(found), "workload": work, "device": "CPU"}))
    said = console.file.getvalue()
    assert "iteration, each process of stock: 8.00, 4.50" in said
    assert "iteration, each process of plug-in: 4.00, 4.25" in said


def test_losses_are_equal_only_if_all_runs_agree():
    runs = [Measured(losses=(loss,), values={}) for loss in ("2", "2", "2.00000024")]
    assert not summarize({"stock": runs[:1], "plugin": runs[1:]})["losses_equal"]


def test_too_few_iterations_are_refused(capsys):
    assert benchmark.main(["step", str(RECIPE), "--iterations", "5"]) == 2
    assert "--iterations, --rounds: expected at least 6" in capsys.readouterr().err


REFUSED = {
    "no ranks": (["--ranks", "0", "--", *MOCK], "--ranks: expected 1 or more, got 0"),
    "another machine": (["--set", "requires.sm=999"], "requires: expected more than this machine"),
    "nowhere to draw": (["--out", "/none/a.png", "--", *MOCK], "/none/a.png: expected a file"),
}


def test_a_picture_of_no_known_kind_is_refused(capsys):
    with pytest.raises(SystemExit) as exit:
        benchmark.main(["step", str(RECIPE), "--out", "step.gif"])
    assert exit.value.code == cli.BAD_INPUT
    assert "expected a name that ends in .png, .svg, .pdf, .jpg or .jpeg" in capsys.readouterr().err


GIVEN = {  # flags of the user -> what is added for data
    "nothing": ([], MOCK),
    "a tokenizer and its words": (MOCK[1:], ["--mock-data"]),
    "data": (["--data-path", "some"], []),
}


@pytest.mark.parametrize(("given", "added"), GIVEN.values(), ids=GIVEN)
def test_a_recipe_that_names_no_data_is_given_what_makes_some_up(given, added):
    """On both sides, behind the user's own."""
    args = argparse.Namespace(deterministic=False, iterations=6, megatron_args=given)
    recipe = load_recipe(RECIPE, [])
    assert bench_step.missing_data(args, recipe) == added
    for side in ("stock", "plugin"):
        own = bench_step.megatron_argv(args, recipe, side)[len(recipe.megatron_argv()) :]
        assert own[: len(given) + len(added)] == [*given, *added]


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused_before_a_rank_starts(words, message, capsys):
    assert benchmark.main(["step", str(RECIPE), *words]) == cli.BAD_INPUT
    assert message in capsys.readouterr().err


def test_logs_of_an_earlier_bench_are_not_written_over(tmp_path, capsys):
    """Those of a later round, too, and before the first is measured."""
    (tmp_path / "1-stock").mkdir()
    words = ["step", str(RECIPE), "--rounds", "2", "--logs", str(tmp_path)]
    assert benchmark.main(words) == cli.BAD_INPUT
    assert "expected no logs of an earlier bench, got 1-stock" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["1-stock"]


ENDS = {  # how ranks end -> exit code, and what is said
    "a rank that fails, though with the code of bad input": (
        {"failure": RankFailure(rank=1, exit_code=2, reason="no", log=Path(), disk_full=False)},
        (1, "error: step: stock: expected a run to its end, but rank 1 ended with exit code"),
    ),
    "Ctrl-C": ({"stopped_by": signal.SIGINT}, (130, "step: stock: stopped by SIGINT")),
    "kill": ({"stopped_by": signal.SIGTERM}, (143, "step: stock: stopped by SIGTERM")),
}


@pytest.mark.parametrize(("end", "wanted"), ENDS.values(), ids=ENDS)
def test_exit_codes_are_those_of_training(end, wanted, monkeypatch, capsys):
    result = LaunchResult(state=TrainingState(), seconds=1.0, **end)
    monkeypatch.setattr(launcher, "launch", lambda plan, console: result)
    code = benchmark.main(["step", str(RECIPE), "--", "--mock-data"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert (code, last[: len(wanted[1])]) == wanted


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
        benchmark.main(["step", "--help"])
    text = capsys.readouterr().out
    for key, figure in FIGURES.items():
        assert f"{key}: {figure.label}" in text
        assert figure.meaning in text


def medians(**values):
    return dict.fromkeys(FIGURES) | values


def test_what_is_in_no_part_is_a_figure_of_its_own_so_that_all_add_up():
    values = {f"{part}": [1.0, 3.0] for part in PARTS} | {"iteration_ms": [20.0]}
    side = summarize({"stock": [Measured(losses=("2",), values=values)], "plugin": []})["stock"]
    assert side["unaccounted_ms"] == 20 - 2 * len(PARTS)
    assert sum(side[key] for key in (*PARTS, "unaccounted_ms")) == side["iteration_ms"]


WHY = {  # what was run -> what is said of losses that differ
    "portable experts": ({"portable_experts": True}, "expected, as stock has experts in bf16"),
    "clipping": ({"clip_grad": 1.0}, "expected, as norms that clip are summed in another order"),
    "algorithms": ({"deterministic": False}, "expected, as algorithms need not repeat"),
    "nothing": ({}, "losses differ: not expected, please report it"),
    "bf16": ({"portable_experts": True, "format": "bf16"}, "not expected, please report it"),
}


@pytest.mark.parametrize(("changes", "said"), WHY.values(), ids=WHY)
def test_losses_that_differ_are_said_to_be_expected_or_not(changes, said):
    report = {"workload": WORK | changes, "device": "CPU", "losses_equal": False}
    assert said in title_of(report)
    assert title_of(report | {"losses_equal": True}).endswith("; the same losses")


@pytest.fixture
def drawn(monkeypatch):
    """Every bar of a picture drawn: its row, where it begins and how long it is; and its texts."""
    from matplotlib.axes import Axes

    bars, texts, barh, text = [], [], Axes.barh, Axes.text

    def draw_and_keep(axes, row, width, left, **style):
        bars.append((row, left, width))
        return barh(axes, row, width, left=left, **style)

    def write_and_keep(axes, x, y, said, **style):
        if style.get("weight") == "bold":
            texts.append(said)
        return text(axes, x, y, said, **style)

    monkeypatch.setattr(Axes, "barh", draw_and_keep)
    monkeypatch.setattr(Axes, "text", write_and_keep)
    return bars, texts


def test_the_bars_of_the_picture_add_up_to_what_stands_behind_them(drawn):
    """Each part begins where the one before ends; what is in no part has one of its own. Where the
    parts, medians of other iterations, are longer than an iteration, that stands in brackets."""
    parts = dict.fromkeys(PARTS, 1.0)
    sides = {
        "stock": medians(**parts, iteration_ms=10.0),
        "plugin": medians(**parts | {"post_processing_ms": None}, iteration_ms=6.0),
    }
    report = {**sides, "workload": WORK, "device": "CPU", "losses_equal": True}
    picture = bench_step_picture.draw(report, Path("step.png"))
    assert picture.startswith(b"\x89PNG")
    bars, texts = drawn
    ends = []
    for count in (len(PARTS) + 1, len(PARTS) - 1):
        for row in range(2):
            of_row, bars = bars[:count], bars[count:]
            assert [place for place, _, _ in of_row] == [row] * count
            reached = [left + width for _, left, width in of_row]
            assert [left for _, left, _ in of_row] == [0.0, *reached[:-1]]
            ends.append(reached[-1])
    assert not bars
    assert ends == [10.0, 7.0, 7.0, 6.0]
    assert texts == ["10.0", "7.0 (iteration 6.0)", "7.0", "6.0"]


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
    assert benchmark.main(["step", str(RECIPE), *options, "--", *megatron]) == 0
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
    """Every part of a step on the CPU, of stock's experts in bf16 and of ours in MXFP8, on samples
    that are made up, as the recipe names none."""
    path = tmp_path / "step.json"
    options = ["--rounds", "1", "--iterations", "6", "--ranks", "1", "--json", str(path)]
    small = ["--seq-length", "64", "--global-batch-size", "4"]
    assert benchmark.main(["step", str(RECIPE), *options, "--", *small]) == 0
    report = json.loads(path.read_text())
    for side in ("stock", "plugin"):
        assert [len(losses) for losses in report["losses"][side]] == [6]
        missing = {figure for figure, value in report[side].items() if value is None}
        assert missing == {"peak_bytes"}, side
    assert report["plugin"]["requantize_ms"] > 0
