"""What ``python -m benchmarks`` writes can be read by a program; the figures are the machine's."""

import json
import sys
from functools import partial
from itertools import product

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import timing as stopwatch
from benchmarks.cases import Case
from moe_optim.environment import find_versions
from moe_optim.formats import FORMATS, FP8_BLOCK, MXFP8
from tests.support.ranks import fork_context

WORK = [
    "fp32 to wire planes",
    "bf16 to wire planes, source zeroed",
    "after the gather",
    "step to wire planes, fp32 moments",
    "step to wire planes, bf16 moments",
    "gradient norm",
    "health",
]


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that runs the command, quickly, and returns the report it wrote."""
    monkeypatch.setattr(stopwatch, "REPEATS", 1)
    monkeypatch.setattr(stopwatch, "WARM_UP", 0)
    monkeypatch.setattr(stopwatch, "COPY_BYTES", {"cuda": 1 << 30, "cpu": 1 << 20})
    monkeypatch.setenv("COLUMNS", "250")

    def run(*options):
        path = tmp_path / "report.json"
        assert benchmark.main(["requantize", *options, "--json", str(path)]) == 0
        return json.loads(path.read_text())

    return run


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.extended
@pytest.mark.usefixtures("without_gpu")
def test_every_format_and_work_has_a_row_by_default(measure):
    """Nothing follows a gather of row-only formats."""
    report = measure()
    assert report["versions"] == find_versions()
    names = [(row["format"], row["work"]) for row in report["rows"]]
    expected = [
        (name, work)
        for name, work in product(FORMATS, WORK)
        if not (FORMATS[name].is_row_only and work == "after the gather")
    ]
    assert names == [*expected, ("tensorwise", "fp32 to codes and scales")]
    for row in report["rows"]:
        assert (row["shape_set"], row["shard"]) == ("small, 2 layers", "1/1")
        assert (row["members"], row["parameters"]) == (8, 8 * 256 * 128)
        assert (row["te_ms"], row["te_fraction_of_floor"]) == (None, None)
        assert (row["temporary_bytes"], row["launches"]) == (None, 0)


@pytest.mark.usefixtures("without_gpu")
def test_a_shard_requantizes_its_part_and_gathers_nothing(measure):
    """Only NVFP4 has a maximum over ranks that own whole blocks, and the row says what it lacks."""
    rows = measure("--shape-set", "small", "--shard", "1/4", "--format", "nvfp4", "mxfp8")["rows"]
    first, second, _, *steps, norm, health = WORK
    of_shards = [first, second, *steps]
    alone = [f"{work}, no all-reduce" for work in of_shards]
    assert [row["work"] for row in rows] == [*alone, norm, health, *of_shards, norm, health]
    for row in rows:
        assert (row["shard"], row["members"]) == ("1/4", 8)
        assert row["parameters"] == 8 * 256 * 128 // 4


@pytest.mark.parametrize(
    ("format", "shard", "rows"),
    [
        (MXFP8, 1, (1536, 2048)),
        (MXFP8, 8, (192, 256)),
        (FP8_BLOCK, 8, (128, 256)),  # 192 rows are one block row and a half
        (MXFP8, 100, (32, 32)),
    ],
)
def test_shards_are_whole_block_rows(format, shard, rows):
    case = Case(format=format, shape_set="w1", shard=shard, device="cpu")
    assert set(zip(case.members, case.owned, strict=True)) == {
        ((1536, 2048), rows[0] * 2048),
        ((2048, 768), rows[1] * 768),
    }


@pytest.fixture(scope="module")
def gather_report(tmp_path_factory):
    """Return what ``bench gather`` writes on two ranks of this CPU, forked after the imports."""
    path = tmp_path_factory.mktemp("gather") / "report.json"
    formats = ["--format", "bf16", "mxfp8", "nvfp4"]
    starting = sys.modules["torch.multiprocessing.spawn"]
    method = fork_context().get_start_method()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "spawn", partial(starting.start_processes, start_method=method))
        assert benchmark.main(["gather", *formats, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_bench_gather_measures_every_format_on_both_wires(gather_report):
    assert gather_report.keys() == {"command", "commit", "device", "versions", "rows"}
    kinds = [(row["format"], row["wire"]) for row in gather_report["rows"]]
    assert kinds == [
        ("bf16", "bf16"),
        *(("mxfp8", wire) for wire in ("bf16", "quantized")),
        *(("nvfp4", wire) for wire in ("bf16", "quantized")),
    ]
    for row in gather_report["rows"]:
        phases = row["fill_ms"] + row["gather_ms"] + row["land_ms"]
        assert row["total_ms"] == pytest.approx(phases, abs=1e-3)


def test_bench_gather_counts_what_travels(gather_report):
    """Bytes follow from shapes: 2 for bf16, data and scales for the others, padding aside."""
    found = {(row["format"], row["wire"]): row for row in gather_report["rows"]}
    numel = found["bf16", "bf16"]["parameters"]
    assert found["bf16", "bf16"]["wire_bytes"] == 2 * numel
    assert found["mxfp8", "bf16"]["wire_bytes"] == 2 * numel
    assert found["mxfp8", "quantized"]["wire_bytes"] == numel * 2 * 33 / 32
    experts = 8
    assert found["nvfp4", "quantized"]["wire_bytes"] == numel * 129 / 256 + 4 * experts
