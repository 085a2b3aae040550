"""Tables of documents from the results of ``python -m benchmarks muon`` and ``step``."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.muon.cases import PLUGIN, STOCK
from benchmarks.muon.host import GRAPH
from benchmarks.muon.iteration import ONE_AT_A_TIME
from benchmarks.muon.step import STOCK_STEP, WHOLE
from tools.documents.code_tables import table

FORMAT = "fp8_block"
"""Format of the tables in short."""
SIDES = (STOCK, PLUGIN)
_PLUGIN_KEY = "plugin"  # key of the plug-in's side in a result of ``benchmarks step``
Report = Mapping[str, Any]


def rows_of(report: Report, case: str) -> list[dict[str, Any]]:
    """Return the rows of a case; ValueError if the result has none."""
    rows = [row for row in report["rows"] if row["case"] == case]
    if not rows:
        raise ValueError(f"expected rows of the case {case}, got none. Measure all cases.")
    return rows


def pick(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the only row with the wanted values; ValueError if there is another number."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"expected one row with {wanted}, got {len(found)}. Measure all cases.")
    return found[0]


def muon_in_short(report: Report, training: Report) -> str:
    """Return stock, the plug-in and their ratio for each work, FP8 blocks on our side."""
    optimizer = training["workload"]["optimizer"]
    if optimizer != "muon":
        raise ValueError(
            f"expected a result of Muon, got {optimizer}. Measure it with --optimizer muon."
        )
    iterations = rows_of(report, "apart")
    stock = pick(iterations, way=ONE_AT_A_TIME)
    ours = pick(iterations, way=f"{PLUGIN}, bf16")
    step, host, gather = (rows_of(report, case) for case in ("step", "host", "gather"))
    rows = [
        _pair(f"Newton-Schulz of {stock['matrices']} matrices, ms", stock["ms"], ours["ms"]),
        _pair(
            f"their whole step into `{FORMAT}`, ms",
            _whole_stock(step)["ms"],
            pick(step, way=PLUGIN, format=FORMAT, work=WHOLE)["ms"],
        ),
    ]
    most = max(row["matrices"] for row in host)
    of_stock, ours_, graphed = (
        pick(host, way=way, matrices=most)["host_ms"] for way in (*SIDES, GRAPH)
    )
    rows.append(_pair(f"host time of a step of {most:,} matrices, ms", of_stock, ours_))
    rows.append(_pair("the same, ours as a CUDA graph, ms", of_stock, graphed, digits=2))
    sides = (training[key]["optimizer_ms"] for key in (STOCK, _PLUGIN_KEY))
    rows.append(_pair("`optimizer.step()` in training, ms", *sides))
    ranks = gather[0]["data_parallel"]
    of_ranks = [row for row in gather if row["data_parallel"] == ranks]
    sides = (
        pick(of_ranks, way=way, format=format)["bytes_per_parameter"]
        for way, format in ((STOCK, "bf16"), (PLUGIN, FORMAT))
    )
    rows.append(_pair("bytes gathered per parameter", *sides, digits=2))
    return table(["", "Megatron", "moe_optim", "ratio"], rows)


def _whole_stock(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return stock's step with its cast, or without one if it was not measured."""
    stock = [row for row in rows if row["way"] == STOCK]
    with_cast = [row for row in stock if row["work"] == WHOLE and row["format"] == FORMAT]
    return with_cast[0] if with_cast else pick(stock, work=STOCK_STEP)


def _pair(label: str, stock: float, plugin: float, digits: int = 1) -> list[str]:
    share = plugin / stock
    of_stock = f"{share:.2f}" if share >= 0.005 else "< 0.01"
    return [label, f"{stock:.{digits}f}", f"{plugin:.{digits}f}", of_stock]
