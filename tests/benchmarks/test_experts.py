"""``python -m benchmarks experts``: programs can read its rows; figures are the machine's."""

import json
import shlex

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import experts as bench_experts
from benchmarks import experts_report
from benchmarks import timing as stopwatch
from benchmarks.experts import ExpertsCase, _find_amax, _formula, _lay_out, _ratios, _stacked
from moe_optim.commands.cli import main as cli
from tests.support.bytes import assert_bytes_equal

KEYS = {"command", "commit", "device", "versions", "copy_tb_per_s", "rows"}
ROW = {
    "experts",
    "shape",
    "bits",
    "placement",
    "way",
    "forward_ms",
    "backward_ms",
    "step_ms",
    "forward_fraction_of_floor",
    "backward_fraction_of_floor",
    "forward_host_us",
    "backward_host_us",
    "forward_of_contiguous",
    "backward_of_contiguous",
    "forward_of_best_other",
    "backward_of_best_other",
    "temporary_bytes",
    "differing_elements",
}
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


def test_every_grid_size_placement_and_way_has_a_row(measure):
    report = measure()
    assert report.keys() == KEYS
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
        assert row.keys() == ROW
        assert row["shape"] == "64x96"
        assert row["differing_elements"] == 0
        assert (row["forward_of_best_other"] is None) == (row["way"] != "moe_optim")
        is_compared = row["placement"] == "scattered" and row["way"] != "moe_optim on a stack"
        assert (row["forward_of_contiguous"] is None) != is_compared


def test_ratios_are_of_the_same_way_and_of_the_fastest_of_the_others():
    times = {"moe_optim": 1.0, "moe_optim on a stack": 0.5, "loop": 8.0, "ModelOpt": 4.0}
    rows = [{"way": way, "forward_ms": ms, "backward_ms": 2 * ms} for way, ms in times.items()]
    contiguous = {"forward_ms": 0.8, "backward_ms": 4.0}
    assert _ratios(rows[0], contiguous, rows) == {
        "forward_of_contiguous": 1.25,
        "forward_of_best_other": 0.25,
        "backward_of_contiguous": 0.5,
        "backward_of_best_other": 0.25,
    }
    assert set(_ratios(rows[2], None, rows).values()) == {None}


@pytest.mark.parametrize("bits", [8, "e4m3"])
def test_a_way_that_gives_other_bits_is_counted(bits):
    case = ExpertsCase(experts=3, rows=8, cols=32, bits=bits, device="cpu")
    experts, gradients = _lay_out(case, "scattered")
    amax = _find_amax(experts) * 0.5
    for factor, differs in ((1.0, False), (0.9, True)):
        way = bench_experts.partial(_stacked, bench_experts.partial(_formula, amax * factor, bits))
        found = bench_experts._count_differences(case, experts, gradients, way)
        assert (found > 0) == differs


def test_scattered_experts_have_the_same_values_in_another_order_with_gaps():
    case = ExpertsCase(experts=16, rows=8, cols=32, bits=8, device="cpu")
    (whole,), _ = _lay_out(case, "contiguous")
    parts, _ = _lay_out(case, "scattered")
    assert_bytes_equal(torch.stack(parts).detach(), whole.detach())
    addresses = [part.data_ptr() for part in parts]
    assert addresses != sorted(addresses)
    steps = {b - a for a, b in zip(sorted(addresses), sorted(addresses)[1:], strict=False)}
    assert steps == {(8 * 32 + 192) * 2}


def test_the_table_shows_the_rows_of_the_file(measure, capsys):
    report = measure("--experts", "2", "--bits", "8")
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if line.startswith("│")]
    shown = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    cells = [[row[name] for name in experts_report.COLUMNS] for row in report["rows"]]
    assert shown == [["-" if cell is None else str(cell) for cell in row] for row in cells]
    assert captured.err.splitlines()[0] == "ModelOpt: absent: a test"


def test_the_command_of_the_report_asks_for_the_same(measure):
    command = measure("--experts", "3", "--shape", "16", "8")["command"]
    *name, _ = shlex.split(command)[:4]
    words = shlex.split(command)[3:]
    args = benchmark.build_parser().parse_args(words)
    found = tuple(name), args.experts, args.shape, args.bits, args.device
    assert found == (("python", "-m", "benchmarks"), [3], [16, 8], ["8", "e4m3"], "cpu")


@pytest.mark.parametrize("option", [["--experts", "0"], ["--shape", "8", "-1"]], ids=" ".join)
def test_sizes_that_are_none_are_refused(option, capsys):
    assert benchmark.main(["experts", "--device", "cpu", *option]) == cli.BAD_INPUT
    assert "--experts, --shape: expected numbers above 0" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main(["experts", "--device", "cuda"]) == cli.BAD_INPUT
    assert "--device cuda: expected a CUDA GPU, got none" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_is_refused_before_the_work(tmp_path, capsys):
    path = tmp_path / "nowhere" / "figures.json"
    assert benchmark.main(["experts", "--json", str(path)]) == cli.BAD_INPUT
    assert f"error: {path}: expected a file to write" in capsys.readouterr().err
