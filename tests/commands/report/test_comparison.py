"""Runs beside each other: figures as they recorded them, and a dash for what they did not."""

import json

import pytest

from moe_optim.commands.cli import main as cli
from tests.commands.report.test_run_report import Reader
from tests.support.training_runs.report_runs import LOSSES, TIMES, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    memory = {"mem-max-allocated-bytes": [(1, 2.0**20), (2, 3.0 * 2**20)]}
    write_run(parent / "fp4", LOSSES | TIMES | memory)
    bare = {"lm loss": [(iteration, 5.0) for iteration in range(1, 11)]}
    write_run(parent / "bare", bare, model=None, summary=None)
    return [parent / "fp4", parent / "bare"]


def test_no_page_is_written_over_a_run_or_its_report(runs, tmp_path, capsys):
    """Neither those that it is about nor others. A run's own report can be written again."""
    other = write_run(tmp_path / "other")
    compare = ["compare", *map(str, runs)]
    report = ["report", str(runs[0])]
    for words, out in (
        *((compare, path) for path in (runs[0], runs[0] / "report", other, other / "report")),
        *((report, path) for path in (runs[0], other, other / "report")),
        (["report", str(runs[0] / "tensorboard")], runs[0]),
    ):
        before = [sorted(run.rglob("*")) for run in (runs[0], other)]
        assert cli.main([*words, "--out", str(out)]) == 2
        assert "expected a folder for a page, got that of a run" in capsys.readouterr().err
        assert [sorted(run.rglob("*")) for run in (runs[0], other)] == before
    for _ in range(2):
        assert cli.main(["report", str(other), "--out", str(other / "report")]) == 0


def test_figures_are_those_of_the_runs(runs, tmp_path, capsys):
    assert cli.main(["compare", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    fp4, bare = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert fp4 == {
        "run": "fp4",
        "format": "nvfp4",
        "iterations": 40,
        "loss": pytest.approx((4 / 39 + 4 / 40) / 2),
        "held_out_loss": 0.125,
        "iterations_per_second": 2.5,
        "iteration_ms": pytest.approx(300.0),
        "gathered_bytes": 2**20 + 2**19,
        "weight_bytes": 2**22,
        "peak_bytes": 3 * 2**20,
    }
    assert (bare["loss"], bare["iterations"], bare["format"]) == (5.0, 10, "unknown format")
    others = ("held_out_loss", "iterations_per_second", "gathered_bytes", "peak_bytes")
    assert [bare[name] for name in others] == [None] * 4
    screen = capsys.readouterr().out
    assert "0.1250" in screen and "1.50" in screen and "–" in screen
    page = Reader((tmp_path / "out" / "index.html").read_text())
    assert all(url.startswith("data:image/png;base64,") for url in page.loads)
    for what in ("training loss", "held-out loss", "iterations/s", "gathered MiB", "peak MiB"):
        assert any(what in alt for alt in page.alts), what
    assert len(list((tmp_path / "out").glob("*.png"))) == len(page.alts) == 6
    # A run with an entropy of bytes has bytes for tokens; one without a summary has not
    assert "Losses in nats/byte or nats/token;" in page.text
