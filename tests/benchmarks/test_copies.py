"""``python -m benchmarks copies``: programs can read its rows; figures are the machine's."""

import json

import pytest

from benchmarks import __main__ as benchmark
from benchmarks import copies, timing


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that runs the command, quickly, and returns the report it wrote."""
    monkeypatch.setattr(copies, "REPEATS", 1)
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "WARM_UP", 0)
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setenv("COLUMNS", "250")

    def run(*options):
        path = tmp_path / "report.json"
        words = ["copies", "--device", "cpu", "--experts", "2", *options, "--json", str(path)]
        assert benchmark.main(words) == 0
        return json.loads(path.read_text())

    return run


def test_every_format_has_a_row_of_equal_bits(measure):
    """Steps need Transformer Engine, and a GPU."""
    rows = measure()["rows"]
    assert [row["format"] for row in rows] == list(copies.COMPUTED)
    for row in rows:
        assert row["differing_elements"] == 0 and row["copy_ms"] > 0
        assert row["step_ms"] is row["step_ratio"] is None
