"""``python -m benchmarks checkpoint``: what is measured is written, and is a save and a load."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_two_ranks_write_half_of_the_states_each(tmp_path: Path):
    """One layer of experts, in bf16; a rank writes weights, too, and gathers nothing."""
    figures = tmp_path / "figures.json"
    words = f"checkpoint --parameters 1 --ranks 2 --side ours --dir {tmp_path} --json {figures}"
    assert main(words.split()) == 0
    report = json.loads(figures.read_text())
    states, weights = 12 * report["parameters"], 2 * report["parameters"]
    (row,) = report["rows"]
    assert states / 2 < row["written_bytes"] < 1.05 * (states / 2 + weights)
    assert row["save_peak_bytes"] < 1.5 * states  # a gather holds twice the states
    assert row["load_peak_bytes"] < states
