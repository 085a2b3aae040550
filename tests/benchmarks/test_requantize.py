"""What ``python -m benchmarks`` writes can be read by a program; the figures are the machine's."""

import json
import sys
from functools import partial

import pytest

from benchmarks import __main__ as benchmark
from benchmarks.cases import Case
from moe_optim.formats import FP8_BLOCK, MXFP8
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


def test_a_shard_requantizes_its_part_and_gathers_nothing(measure):
    """Only NVFP4 has a maximum over ranks that own whole blocks, and the row says what it lacks."""
    rows = measure(
        "requantize", "--shape-set", "small", "--shard", "1/4", "--format", "nvfp4", "mxfp8"
    )["rows"]
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


def test_bench_gather_counts_what_travels(tmp_path, monkeypatch):
    """Bytes follow from shapes: 2 for bf16, data and scales and an amax an expert for NVFP4."""
    starting = sys.modules["torch.multiprocessing.spawn"]
    method = fork_context().get_start_method()  # after the imports
    monkeypatch.setattr(starting, "spawn", partial(starting.start_processes, start_method=method))
    path = tmp_path / "report.json"
    assert benchmark.main(["gather", "--format", "nvfp4", "--json", str(path)]) == 0
    found = {row["wire"]: row for row in json.loads(path.read_text())["rows"]}
    numel = found["bf16"]["parameters"]
    assert found["bf16"]["wire_bytes"] == 2 * numel
    assert found["quantized"]["wire_bytes"] == numel * 129 / 256 + 4 * 8
    for row in found.values():
        phases = row["fill_ms"] + row["gather_ms"] + row["land_ms"]
        assert row["total_ms"] == pytest.approx(phases, abs=1e-3)
