"""Tables of Muon's measurements, of made-up results."""

from dataclasses import asdict

import pytest

from benchmarks.muon.cases import PLUGIN, STOCK, Row
from benchmarks.muon.host import GRAPH
from benchmarks.muon.iteration import ONE_AT_A_TIME, WAYS
from benchmarks.muon.step import STOCK_CAST, STOCK_STEP, WHOLE
from benchmarks.step_figures import FIGURES
from tools.documents.muon_tables import muon_in_short

PART_MS = {"momentum": 2.0, "pack": 1.0, "iteration": 16.0, "update and encoding": 3.0}


def row(case, work, way, **figures):
    return asdict(
        Row(case=case, work=work, way=way, **{"matrices": 384, "parameters": 9, **figures})
    )


def iterations(case, factor):
    times = dict(zip((ONE_AT_A_TIME, *WAYS), (200.0, 30.0, 25.0, 18.0, 19.0, 14.0), strict=True))
    for way, ms in times.items():
        yield row(
            case,
            "Newton-Schulz",
            way,
            matrices=384 if case == "apart" else 256,
            ms=factor * ms,
            host_ms=ms / 2,
            tflop_per_s=1000 / ms,
            of_floor=0.5,
            distance=0.001 * factor,
        )


def steps(formats):
    yield row("step", STOCK_STEP, STOCK, ms=300.0, host_ms=299.0)
    for format in formats:
        if format != "nvfp4":
            yield row("step", STOCK_CAST, STOCK, format=format, ms=20.0, host_ms=20.0)
            yield row("step", WHOLE, STOCK, format=format, ms=320.0, host_ms=318.0)
    for format in formats:
        figures = {"ms": 22.0, "of_floor": 0.8, "host_ms": 1.5}
        yield row("step", WHOLE, PLUGIN, format=format, **figures)
        for part, ms in PART_MS.items():
            yield row("step", part, PLUGIN, format=format, ms=ms, of_floor=0.9)


def result(formats=("fp8_block", "nvfp4")):
    """Return what ``python -m benchmarks muon`` writes, with figures that are easy to divide."""
    host = [
        row("host", "host time of a step", way, matrices=matrices, host_ms=ms)
        for matrices, times in ((384, (320.0, 1.6, 0.02)), (12_288, (10_000.0, 4.0, 0.02)))
        for way, ms in zip((STOCK, PLUGIN, GRAPH), times, strict=True)
    ]
    gather = [
        row(
            "gather",
            "bytes gathered",
            way,
            format=format,
            bytes_per_parameter=nbytes,
            data_parallel=ranks,
        )
        for ranks in (2, 8)
        for way, format, nbytes in ((STOCK, "bf16", 2.0), (PLUGIN, "fp8_block", 1.0002))
    ]
    return {
        "copy_tb_per_s": 3.0,
        "product_tflop_per_s": 760.4,
        "rows": [
            *iterations("apart", 1),
            *iterations("together", 2),
            *steps(formats),
            *host,
            *gather,
        ],
    }


def training(optimizer="muon"):
    figures = dict.fromkeys(FIGURES, 1.0)
    gib = {"peak_bytes": 3 * 2**30, "gathered_bytes": 2 * 10**9}
    return {
        "workload": {"optimizer": optimizer, "format": "fp8_block"},
        "stock": {**figures, **gib, "optimizer_ms": 2000.0, "post_processing_ms": None},
        "plugin": {**figures, **gib, "optimizer_ms": 100.0, "gathered_bytes": 10**9},
    }


def cells(text):
    """Return the first cell of each line of a table -> the other ones."""
    lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
    return {first.strip(): [one.strip() for one in others] for first, *others in lines}


def test_the_table_in_short_has_stock_ours_and_their_ratio():
    found = cells(muon_in_short(result(), training()))
    assert found["Newton-Schulz of 384 matrices, ms"] == ["200.0", "18.0", "0.09"]
    whole = found["the whole step of these experts into `fp8_block`, ms"]
    assert whole == ["320.0", "22.0", "0.07"]
    assert found["the host, busy in a step of 384 matrices, ms"] == ["320.0", "1.6", "0.01"]
    assert found["the host, busy in a step of 12,288 matrices, ms"] == ["10000.0", "4.0", "4e-04"]
    assert found["the same with `--optimizer-cuda-graph`"] == ["10000.000", "0.020", "2e-06"]
    assert found["`optimizer.step()` in training, ms"] == ["2000.0", "100.0", "0.05"]
    assert found["bytes gathered per parameter"] == ["2.00", "1.00", "0.50"]


def test_without_a_cast_of_stock_its_step_alone_is_compared():
    report = result()
    report["rows"] = [
        one
        for one in report["rows"]
        if (one["way"], one["format"]) != (STOCK, "fp8_block") or one["case"] != "step"
    ]
    found = cells(muon_in_short(report, training()))
    assert found["the whole step of these experts into `fp8_block`, ms"][0] == "300.0"


def test_a_result_that_lacks_a_case_or_is_not_muons_is_refused():
    report = result()
    report["rows"] = [one for one in report["rows"] if one["case"] != "host"]
    with pytest.raises(ValueError, match="rows of the case host"):
        muon_in_short(report, training())
    with pytest.raises(ValueError, match="expected a result of Muon, got adam"):
        muon_in_short(result(), training("adam"))
