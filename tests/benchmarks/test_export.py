"""What ``python -m benchmarks export`` writes: for each format, experts going three ways."""

import json
import shlex

import pytest

from benchmarks import __main__ as benchmark
from benchmarks.export import measure as bench

NUMEL = 2 * 4 * 2 * 256 * 128
WAYS = [
    (bench.IN_BF16, bench.STACKED),
    (bench.AS_THEY_ARE, bench.STACKED),
    (bench.QUANTIZED_AGAIN, bench.STACKED),
    (bench.IN_BF16, bench.ONE_EACH),
    (bench.AS_THEY_ARE, bench.ONE_EACH),
]
BITS = {"mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16, "fp8_block": 8 + 32 / 128**2}


@pytest.mark.extended
def test_every_way_has_its_bytes_and_only_quantizing_again_gives_others(tmp_path, capsys):
    """Powers of two are found again where blocks are square, not in rows and columns of MXFP8."""
    path = tmp_path / "report.json"
    formats = list(BITS)
    args = ["export", "--format", *formats, "--ranks", "2", "--json", str(path)]
    assert benchmark.main(args) == 0
    report = json.loads(path.read_text())
    rows = report["rows"]
    ways = [(row["format"], (row["way"], row["tensors"])) for row in rows]
    assert ways == [(format, way) for format in formats for way in WAYS]
    for row in rows:
        assert (row["ranks"], row["parameters"]) == (2, NUMEL)
        bits = BITS[row["format"]] if row["way"] == bench.AS_THEY_ARE else 16
        assert row["loaded_bytes"] == NUMEL * bits / 8 + _global_scales(row)
        assert 2 * row["received_bytes"] == row["loaded_bytes"]
        assert row["ms"] > 0 and row["host_ms"] > 0 and row["of_bf16"] > 0
        stored = 2 + (row["format"] == "nvfp4") if row["way"] == bench.AS_THEY_ARE else 1
        experts = 4 if row["tensors"] == bench.ONE_EACH else 1
        assert row["tensors_per_linear"] == stored * experts
        assert row["transfers_per_linear"] == 1 / 2  # both linears of a layer go together
        is_again = row["way"] == bench.QUANTIZED_AGAIN
        assert (row["other_scales"] is not None) == is_again
    others = {row["format"]: row["other_scales"] for row in rows if row["other_scales"] is not None}
    assert others["mxfp8"] > 0 == others["fp8_block"]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(shown) == len(rows)
    parsed = benchmark.build_parser().parse_args(shlex.split(report["command"])[3:])
    assert (parsed.format, parsed.model, parsed.ranks) == (formats, "small", 2)


def _global_scales(row):
    is_native_nvfp4 = row["format"] == "nvfp4" and row["way"] == bench.AS_THEY_ARE
    return 4 * 2 * 2 * 4 if is_native_nvfp4 else 0  # fp32, of linears, layers and experts
