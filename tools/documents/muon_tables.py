"""Tables of documents from the results of ``python -m benchmarks muon`` and ``step``."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.muon.cases import PLUGIN, STOCK
from benchmarks.muon.host import GRAPH
from benchmarks.muon.iteration import ONE_AT_A_TIME
from benchmarks.muon.step import PARTS, STOCK_CAST, STOCK_STEP, WHOLE
from tools.documents.code_tables import table

FORMAT = "fp8_block"
"""Format of the tables in short."""
SIDES = (STOCK, PLUGIN)
_PLUGIN_KEY = "plugin"  # key of the plug-in's side in a result of ``benchmarks step``
TRAINING_ROWS = {
    "iteration": "iteration_ms",
    "of it forward and backward": "forward_backward_ms",
    "`optimizer.step()`": "optimizer_ms",
    "gradients to masters": "grad_copy_ms",
    "gradient norm": "grad_norm_ms",
    "Muon, and Adam of the rest": "inner_step_ms",
    "requantize": "requantize_ms",
    "gather and post-processing": ("gather_ms", "post_processing_ms"),
    "the rest: clipping, bookkeeping": "optimizer_rest_ms",
    "the host, busy in `optimizer.step()`": "optimizer_host_ms",
}

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
    iterations = rows_of(report, "apart")
    stock = pick(iterations, way=ONE_AT_A_TIME)
    ours = pick(iterations, way=f"{PLUGIN}, bf16")
    step, host, gather = (rows_of(report, case) for case in ("step", "host", "gather"))
    rows = [
        _pair(f"Newton-Schulz of {stock['matrices']} matrices, ms", stock["ms"], ours["ms"]),
        _pair(
            f"the whole step of these experts into `{FORMAT}`, ms",
            _whole_stock(step)["ms"],
            pick(step, way=PLUGIN, format=FORMAT, work=WHOLE)["ms"],
        ),
    ]
    for matrices in dict.fromkeys(row["matrices"] for row in host):
        pair = (pick(host, way=way, matrices=matrices)["host_ms"] for way in SIDES)
        rows.append(_pair(f"the host, busy in a step of {matrices:,} matrices, ms", *pair))
        of_stock, graphed = (
            pick(host, way=way, matrices=matrices)["host_ms"] for way in (STOCK, GRAPH)
        )
        rows.append(_pair("the same with `--optimizer-cuda-graph`", of_stock, graphed, digits=3))
    sides = (training[key]["optimizer_ms"] for key in (STOCK, _PLUGIN_KEY))
    rows.append(_pair("`optimizer.step()` in training, ms", *sides))
    ranks = gather[0]["data_parallel"]
    of_ranks = [row for row in gather if row["data_parallel"] == ranks]
    sides = (
        pick(of_ranks, way=way, format=format)["bytes_per_parameter"]
        for way, format in ((STOCK, "bf16"), (PLUGIN, FORMAT))
    )
    rows.append(_pair("bytes gathered per parameter", *sides, digits=2))
    return table(["", "stock", "plug-in", "of stock"], rows)


def _whole_stock(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return stock's step with its cast, or without one if it was not measured."""
    stock = [row for row in rows if row["way"] == STOCK]
    with_cast = [row for row in stock if row["work"] == WHOLE and row["format"] == FORMAT]
    return with_cast[0] if with_cast else pick(stock, work=STOCK_STEP)


def _pair(label: str, stock: float, plugin: float, digits: int = 1) -> list[str]:
    share = plugin / stock
    of_stock = f"{share:.2f}" if share >= 0.005 else f"{share:.0e}"
    return [label, f"{stock:.{digits}f}", f"{plugin:.{digits}f}", of_stock]


def muon_iterations(report: Report) -> str:
    """Return a line per way of iterating, with gate and up apart and together."""
    apart, together = (rows_of(report, case) for case in ("apart", "together"))
    lines = []
    for one in apart:
        other = pick(together, way=one["way"])
        cells = [
            f"{row['ms']:.1f}, {row['host_ms']:.1f}, {row['tflop_per_s']:.0f}"
            for row in (one, other)
        ]
        worst = max(one["distance"], other["distance"])
        lines.append([one["way"], *cells, f"{one['of_floor']:.2f}", f"{worst:.1e}"])
    number, of_both = apart[0]["matrices"], together[0]["matrices"]
    header = ["ms, host ms, TFLOP/s", f"{number} matrices, gate and up apart"]
    header += [f"{of_both} matrices, together", "of the floor, apart", "from fp64"]
    return (
        f"A large bf16 product ran at {report['product_tflop_per_s']:.0f} TFLOP/s in the same "
        f"run.\n\n{table(header, lines)}"
    )


def muon_step(report: Report) -> str:
    """Return a column per format: stock where it has the format, then ours, whole and by part."""
    rows = rows_of(report, "step")
    formats = list(dict.fromkeys(row["format"] for row in rows if row["way"] == PLUGIN))
    by_key = {(row["way"], row["work"], row["format"]): row for row in rows}

    def line(label: str, way: str, work: str) -> list[str]:
        return [label, *(_time(by_key.get((way, work, format))) for format in formats)]

    step = pick(rows, way=STOCK, work=STOCK_STEP)
    lines = [
        line("stock: whole step", STOCK, WHOLE),
        line("of it the cast", STOCK, STOCK_CAST),
        line("plug-in: whole step", PLUGIN, WHOLE),
        *(line(f"of it {part}", PLUGIN, part) for part in PARTS if _has_part(rows, part)),
    ]
    host = [by_key[PLUGIN, WHOLE, format]["host_ms"] for format in formats]
    lines.append(["the host, busy", *(f"{value:.1f}" for value in host)])
    return (
        f"Stock's step takes {step['ms']:.0f} ms, the host busy for {step['host_ms']:.0f}. A "
        f"device copy moved {report['copy_tb_per_s']:.2f} TB/s in the same run.\n\n"
    ) + table(["ms (of the floor)", *(f"`{name}`" for name in formats)], lines)


def _has_part(rows: Iterable[dict[str, Any]], part: str) -> bool:
    return any(row["work"] == part for row in rows)


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    floor = "" if row["of_floor"] is None else f" ({row['of_floor']:.2f})"
    return f"{row['ms']:.1f}{floor}"


def muon_training(report: Report) -> str:
    """Return the parts of a training step with Muon, for both sides."""
    sides = [report[key] for key in (STOCK, _PLUGIN_KEY)]
    if report["workload"]["optimizer"] != "muon":
        raise ValueError(
            f"expected a result of Muon, got {report['workload']['optimizer']}. Measure it with "
            "--optimizer muon."
        )
    lines = []
    for label, keys in TRAINING_ROWS.items():
        named = (keys,) if isinstance(keys, str) else keys
        lines.append([label, *(f"{sum(side[k] or 0.0 for k in named):.1f}" for side in sides)])
    share = sides[1]["optimizer_ms"] / sides[0]["optimizer_ms"]
    lines.append(["`optimizer.step()`, of stock's", "", f"{share:.2f}"])
    peaks = (side["peak_bytes"] for side in sides)
    lines.append(["peak memory, GiB", *("" if n is None else f"{n / 2**30:.1f}" for n in peaks)])
    lines.append(["gathered, GB", *(f"{side['gathered_bytes'] / 1e9:.2f}" for side in sides)])
    weights = report["workload"]["format"]
    return table(["ms", "stock, bf16 weights", f"plug-in, `{weights}`"], lines)
