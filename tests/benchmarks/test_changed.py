"""What ``python -m benchmarks changed`` writes: shares of bytes by format, rate and steps."""

import json
import shlex

import torch

from benchmarks import __main__ as benchmark
from benchmarks import changed as bench


def test_shares_are_those_of_the_bytes_that_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    path = tmp_path / "report.json"
    options = ["--format", "bf16", "mxfp8_2d", "--lr", "1e-3", "--steps", "1", "2"]
    options += ["--shape", "1", "32", "64"]
    assert benchmark.main(["changed", *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    cases = [(r["format"], r["gradients"], r["steps"]) for r in report["rows"]]
    assert cases == [
        (name, kind, steps)
        for kind in ("noise", "the same")
        for steps in (1, 2)
        for name in ("bf16", "mxfp8_2d")
    ]
    sizes = {"bf16": 2 * 32 * 64, "mxfp8_2d": 32 * 64 + 2}
    for row in report["rows"]:
        assert row["bytes"] == sizes[row["format"]]
        assert 0 < row["changed"] <= row["blocks_4"] <= 1
    words = shlex.split(report["command"])[3:]
    assert benchmark.build_parser().parse_args(words).lr == [1e-3]


def test_blocks_are_counted_whole_with_their_positions():
    old = [torch.zeros(10, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)]
    new = [one.clone() for one in old]
    new[0][[0, 1, 9]] = 1
    row = bench._compare(old, new)
    assert (row["bytes"], row["changed"], row["scales_changed"]) == (14, 3 / 14, 0)
    assert (row["blocks_4"], row["sent_4"]) == (2 / 4, 2 * (4 + 4) / 14)
