"""``moe-optim bench step``: what it reads out of logs, and a whole run on the CPU."""

import json
from pathlib import Path

import pytest

from moe_optim.cli import bench_step
from moe_optim.cli import main as cli

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def log(iterations: int) -> str:
    """Return what Megatron prints of some iterations, all but the figures left out."""
    lines = []
    for number in range(1, iterations + 1):
        lines.append(
            f" [2026-01-01 00:00:00] iteration {number:8}/{iterations:8} | consumed samples: 4 | "
            f"elapsed time per iteration (ms): {100 + number}.5 | learning rate: 1E-05 | "
            f"lm loss: {number}.25E+00 | grad norm: 1.0 |"
        )
        lines.append("(min, max) time across ranks (ms):")
        for timer in bench_step.TIMERS.values():
            lines.append(f"    {timer} {'.' * (46 - len(timer))}: ({number}.00, {2 * number}.50)")
        lines.append("    optimizer-clip-main-grad ......................: (7.00, 7.00)")
    return "\n".join(lines)


def test_figures_are_those_of_the_slowest_rank_after_the_warm_up():
    """Losses and iterations stand in one rank's log, timers in another's."""
    text = log(5)
    losses = "\n".join(line for line in text.splitlines() if "lm loss" in line)
    timers = "\n".join(line for line in text.splitlines() if "lm loss" not in line)
    counted = "".join(f"{number} {number * 10} {number * 100}\n" for number in range(1, 6))
    measured = bench_step.parse([losses, timers], counted)
    assert measured.losses == tuple(f"{number}.25E+00" for number in range(1, 6))
    assert measured.figures["iteration_ms"] == [104.5, 105.5]
    for key in bench_step.TIMERS:
        assert measured.figures[key] == [8.5, 10.5]
    assert measured.figures["main_to_model_and_gather_ms"] == [17.0, 21.0]
    assert measured.figures["gathered_bytes"] == [40.0, 50.0]
    assert measured.figures["peak_bytes"] == [400.0, 500.0]


def test_too_few_iterations_are_refused(capsys):
    assert cli.main(["bench", "step", str(RECIPE), "--iterations", "3"]) == 2
    assert "--iterations, --rounds: expected more than 3" in capsys.readouterr().err


@pytest.mark.extended
def test_both_sides_train_and_are_compared(tmp_path: Path, capsys):
    """On the CPU over gloo: every figure of both sides, their ratio, a table and a picture."""
    report, picture = tmp_path / "step.json", tmp_path / "step.png"
    options = ["--iterations", "5", "--rounds", "1", "--json", str(report), "--out", str(picture)]
    mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
    assert cli.main(["bench", "step", str(RECIPE), *options, "--", *mock]) == 0
    found = json.loads(report.read_text())
    assert found["stock"].keys() == found["plugin"].keys() == found["ratio"].keys()
    for side in ("stock", "plugin"):
        assert found[side]["iteration_ms"] > found[side]["optimizer_ms"] > 0
        assert found[side]["gathered_bytes"] > 0
        assert len(found["losses"][side][0]) == 5
    assert found["workload"]["format"] == "mxfp8"
    assert picture.stat().st_size > 10_000
    assert "plug-in" in capsys.readouterr().out
