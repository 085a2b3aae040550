"""Compares several runs: losses, speed, bytes and memory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.console.tables import build_table
from moe_optim.commands.report.plots import Picture, plot_bars, plot_curves, render, write_page
from moe_optim.commands.report.reading import Run, read_run, require_no_run
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

_MIB = 2**20


HEADER: Mapping[str, str] = {
    "run": "run",
    "format": "format",
    "iterations": "iterations",
    "loss": "training loss",
    "held_out_loss": "held-out loss",
    "iterations_per_second": "iterations/s",
    "iteration_ms": "ms per iteration",
    "gathered_bytes": "gathered MiB",
    "weight_bytes": "weights MiB",
    "peak_bytes": "peak MiB",
}
"""Key -> column heading. A value of None was not recorded."""


def compare(paths: Sequence[Path], out: Path) -> int:
    """Write a page, plots and ``compare.json`` of several runs, print the table, and return 0."""
    if len(paths) < 2 or len({path.resolve() for path in paths}) < len(paths):
        given = ", ".join(map(str, paths))
        raise ConfigError(
            f"compare: expected two or more different runs, got {given}. Name every run once."
        )
    require_no_run(out)
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    runs = dict(zip(names, map(read_run, paths), strict=True))
    rows = [figures_of(name, run) for name, run in runs.items()]
    table = [[_spell(key, row[key]) for key in HEADER] for row in rows]
    unit = " or ".join(sorted({run.loss_unit for run in runs.values()}))
    losses, bars = _losses(runs, unit), _bars(rows)
    html = render(
        "compare.html",
        title=f"{len(runs)} runs compared",
        runs=names,
        header=list(HEADER.values()),
        rows=table,
        unit=unit,
        losses=losses,
        bars=bars,
    )
    page = write_page(out, html, [*losses, *bars])
    content = json.dumps(rows, indent=2) + "\n"
    write_atomically(out / "compare.json", content.encode())
    console = results_console()
    header, cells = [*HEADER.values()], [list(row) for row in table]
    widths = [max(map(len, column)) + 2 for column in zip(header, *cells, strict=True)]
    if console.is_terminal and sum(widths) > console.width:  # a run per column
        header, *cells = map(list, zip(header, *cells, strict=True))
    fold = header if console.is_terminal else ()
    print_table(console, build_table(header, cells, fold=fold, gap=2))
    console.print(str(page))
    return 0


def figures_of(name: str, run: Run) -> dict[str, Any]:
    """Return the numbers of a run, see :data:`HEADER`.

    The training loss is the mean of the last twentieth, times are medians, bytes are those of rank
    0. Peak memory is that of the last rank, on GPUs only.
    """
    train, held_out = run.events.train, run.events.validation
    last = [point.value for point in train[-max(1, len(train) // 20) :]]
    rank0 = run.model.get("rank0") or {}
    weights = [part.get("weight_bytes") or 0 for part in rank0.get("weights") or ()]
    gathered = [rank0.get(key) or 0 for key in ("gathered_bytes", "other_gathered_bytes")]
    times = [point.value for point in run.points("iteration-time")]
    peak = [point.value for point in run.points("mem-max-allocated-bytes")]
    return {
        "run": name,
        "format": run.format,
        "iterations": train[-1].iteration,
        "loss": sum(last) / len(last),
        "held_out_loss": held_out[-1].value if held_out else None,
        "iterations_per_second": run.summary.get("iterations_per_second"),
        "iteration_ms": 1e3 * median(times) if times else None,
        "gathered_bytes": sum(gathered) if rank0 else None,
        "weight_bytes": sum(weights) if weights else None,
        "peak_bytes": int(max(peak)) if peak else None,
    }


def _losses(runs: Mapping[str, Run], unit: str) -> list[Picture]:
    train = {name: run.events.train for name, run in runs.items()}
    held_out = {name: run.events.validation for name, run in runs.items() if run.events.validation}
    return [
        plot_curves(
            f"{kind}-loss",
            curves,
            f"{kind} loss ({unit})",
            alt=f"{kind} loss ({unit}) of all runs",
            smooth=curves is train,
        )
        for kind, curves in (("training", train), ("held-out", held_out))
        if curves
    ]


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[Picture]:
    pictures = []
    for figure in ("iterations_per_second", "gathered_bytes", "weight_bytes", "peak_bytes"):
        unit, label = _MIB if figure.endswith("_bytes") else 1, HEADER[figure]
        if values := {row["run"]: row[figure] / unit for row in rows if row[figure]}:
            name = figure.replace("_", "-")
            pictures.append(plot_bars(name, values, label, f"{label} of each run"))
    return pictures


def _spell(figure: str, value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    if figure.endswith("_bytes"):
        return f"{value / _MIB:,.2f}"
    if figure.endswith("loss"):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
