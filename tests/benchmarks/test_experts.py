"""``python -m benchmarks experts``: programs can read its rows; figures are the machine's."""

import json

import pytest

from benchmarks import __main__ as benchmark
from benchmarks import experts as bench_experts
from benchmarks import timing as stopwatch
from benchmarks.experts import ExpertsCase, _find_amax, _formula, _lay_out, _stacked

CONTIGUOUS = ["moe_optim", "loop", "stack and unbind"]
SCATTERED = ["moe_optim", "moe_optim on a stack", "loop", "stack and unbind"]


@pytest.fixture
def without_modelopt(monkeypatch):
    monkeypatch.setattr(bench_experts, "import_modelopt", lambda: (None, "absent: a test"))


@pytest.fixture
def measure(monkeypatch, tmp_path, without_modelopt):
    """Return a function that runs the command, quickly, and returns the report it wrote."""
    monkeypatch.setattr(bench_experts, "REPEATS", 1)
    monkeypatch.setattr(stopwatch, "REPEATS", 1)
    monkeypatch.setattr(stopwatch, "WARM_UP", 0)
    monkeypatch.setattr(stopwatch, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setenv("COLUMNS", "250")

    def run(*options):
        path = tmp_path / "report.json"
        words = ["experts", "--device", "cpu", *options, "--json", str(path)]
        assert benchmark.main(words) == 0
        return json.loads(path.read_text())

    return run


@pytest.mark.extended
def test_every_grid_size_placement_and_way_has_a_row(measure):
    report = measure()
    assert report["versions"]["modelopt"] == "absent: a test"
    kinds = [(r["bits"], r["experts"], r["placement"], r["way"]) for r in report["rows"]]
    assert kinds == [
        (bits, experts, placement, way)
        for bits in (8, "e4m3")
        for experts in (2, 4)
        for placement, ways in (("contiguous", CONTIGUOUS), ("scattered", SCATTERED))
        for way in ways
    ]
    for row in report["rows"]:
        assert row["shape"] == "64x96"
        assert row["differing_elements"] == 0
        assert (row["forward_of_best_other"] is None) == (row["way"] != "moe_optim")
        is_compared = row["placement"] == "scattered" and row["way"] != "moe_optim on a stack"
        assert (row["forward_of_contiguous"] is None) != is_compared


@pytest.mark.parametrize("bits", [8, "e4m3"])
def test_a_way_that_gives_other_bits_is_counted(bits):
    case = ExpertsCase(experts=3, rows=8, cols=32, bits=bits, device="cpu")
    experts, gradients = _lay_out(case, "scattered")
    amax = _find_amax(experts) * 0.5
    for factor, differs in ((1.0, False), (0.9, True)):
        way = bench_experts.partial(_stacked, bench_experts.partial(_formula, amax * factor, bits))
        found = bench_experts._count_differences(case, experts, gradients, way)
        assert (found > 0) == differs
