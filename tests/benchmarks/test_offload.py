"""What ``python -m benchmarks offload`` writes: a row for each part of the states on the host."""

import json
import shlex

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import timing as stopwatch
from benchmarks.offload import measure as bench
from moe_optim.kernels import staging


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that runs the command, quickly, and returns the report it wrote."""
    monkeypatch.setattr(stopwatch, "REPEATS", 1)
    monkeypatch.setattr(stopwatch, "WARM_UP", 0)
    monkeypatch.setattr(stopwatch, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(staging, "SMALLEST", 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "250")

    def run(*options):
        path = tmp_path / "report.json"
        assert benchmark.main(["offload", *options, "--json", str(path)]) == 0
        return json.loads(path.read_text())

    return run


def test_every_format_has_a_row_for_each_part(measure, capsys):
    report = measure("--format", "nvfp4", "--offload-states", "0", "0.5", "1")
    assert report["link_gb_per_s"] > 0
    parts = [(row["format"], row["offload_states"]) for row in report["rows"]]
    assert parts == [("nvfp4", part) for part in (0, 0.5, 1)]
    for row in report["rows"]:
        assert (row["shape_set"], row["parameters"]) == ("small, 2 layers", 8 * 256 * 128)
        assert row["parameters_on_host"] == row["offload_states"] * row["parameters"]
        assert row["host_bytes"] >= 12 * row["parameters_on_host"]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(shown) == len(report["rows"])
    words = shlex.split(report["command"])[3:]
    args = benchmark.build_parser().parse_args(words)
    assert (args.format, args.shape_set, args.offload_states) == (
        ["nvfp4"],
        "small",
        [0.0, 0.5, 1.0],
    )


def test_other_bytes_than_those_of_the_first_row_are_refused(measure, monkeypatch, capsys):
    """One step more, in the second row."""
    step, calls = bench._step, []

    def step_again(table):
        calls.append(table)
        step(table)
        if len({id(one) for one in calls}) == 2 and len(calls) == 1 + calls.index(table):
            step(table)

    monkeypatch.setattr(bench, "_step", step_again)
    args = ["offload", "--format", "mxfp8", "--offload-states", "0", "1"]
    assert benchmark.main(args) != 0
    assert "expected the bytes of 0.0 with 1.0 of the states on the host" in capsys.readouterr().err
