"""Several runs beside each other: losses, speed, bytes and memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table as ScreenTable

from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.report import plots
from moe_optim.commands.report.page import Page, Picture, Section, Table
from moe_optim.commands.report.reading import Run, read_run, require_no_run
from moe_optim.commands.train.events import Point
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

_MIB = 2**20
_PEAK = "mem-max-allocated-bytes"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run in a line; None is what it has not recorded."""

    run: str
    format: str
    iterations: int
    loss: float
    """Mean of the last twentieth of the training losses, in the run's own unit."""
    held_out_loss: float | None
    iterations_per_second: float | None
    iteration_ms: float | None
    """Median."""
    gathered_bytes: int | None
    """A step, rank 0."""
    weight_bytes: int | None
    """Rank 0."""
    peak_bytes: int | None
    """Largest memory that the last rank had allocated; GPUs alone."""


HEADER: Mapping[str, str] = {
    "format": "format",
    "iterations": "iterations",
    "loss": "training loss",
    "held_out_loss": "held-out loss",
    "iterations_per_second": "iterations/s",
    "iteration_ms": "ms an iteration",
    "gathered_bytes": "gathered MiB",
    "weight_bytes": "weights MiB",
    "peak_bytes": "peak MiB",
}
"""Figure -> heading of its column."""


def compare(paths: Sequence[Path], out: Path) -> int:
    """Write a page, its pictures and ``compare.json``, print the table, and return 0.

    Args:
        paths: run folders, at least two.
        out: folder to write to; created.

    Raises:
        ConfigError: fewer than two runs, or one twice, or ``out`` is the folder of a run or of its
            report.
        LayoutError: there is no run in a folder.
    """
    if len(paths) < 2 or len({path.resolve() for path in paths}) < len(paths):
        given = ", ".join(map(str, paths))
        raise ConfigError(
            f"compare: expected two or more different runs, got {given}. Name every run once."
        )
    require_no_run(out)
    runs = dict(zip(_names(paths), map(read_run, paths), strict=True))
    rows = [figures_of(name, run) for name, run in runs.items()]
    page = build_page(runs, rows).write(out)
    content = json.dumps([asdict(row) for row in rows], indent=2) + "\n"
    write_atomically(out / "compare.json", content.encode())
    console = results_console()
    table = ScreenTable()
    for header in ("run", *HEADER.values()):
        table.add_column(header, no_wrap=True)
    for row in rows:
        table.add_row(row.run, *_cells(row))
    print_table(console, table)
    console.print(str(page))
    return 0


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the name of each folder, or its path where two have one name."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def figures_of(name: str, run: Run) -> Figures:
    """Return what is compared of a run, under ``name``."""
    train, held_out = run.curves.train, run.curves.validation
    last = [point.value for point in train[-max(1, len(train) // 20) :]]
    rank0 = run.model.get("rank0") or {}
    weights = [part["weight_bytes"] for part in rank0.get("weights") or ()]
    gathered = [rank0.get(key) for key in ("gathered_bytes", "other_gathered_bytes")]
    times = [point.value for point in run.points("iteration-time")]
    peak = [point.value for point in run.points(_PEAK)]
    return Figures(
        run=name,
        format=run.format,
        iterations=train[-1].iteration,
        loss=sum(last) / len(last),
        held_out_loss=held_out[-1].value if held_out else None,
        iterations_per_second=run.summary.get("iterations_per_second"),
        iteration_ms=1e3 * median(times) if times else None,
        gathered_bytes=sum(one or 0 for one in gathered) if rank0 else None,
        weight_bytes=sum(weights) if weights else None,
        peak_bytes=int(max(peak)) if peak else None,
    )


def build_page(runs: Mapping[str, Run], rows: Sequence[Figures]) -> Page:
    """Return the page of a comparison."""
    train = {name: run.curves.train for name, run in runs.items()}
    held_out = {name: points for name, run in runs.items() if (points := run.curves.validation)}
    unit = " or ".join(sorted({run.loss_unit for run in runs.values()}))
    losses = [_overlay("training-loss", train, f"training loss ({unit})", smooth=True)]
    if held_out:
        losses.append(_overlay("held-out-loss", held_out, f"held-out loss ({unit})"))
    return Page(
        title=f"{len(runs)} runs compared",
        subtitle=", ".join(runs),
        sections=[
            Section(
                title="Figures",
                table=Table(
                    header=["run", *HEADER.values()], rows=[[row.run, *_cells(row)] for row in rows]
                ),
                note=f"Losses in {unit}; the training loss is the mean of its last twentieth. "
                "Bytes are those of rank 0: gathered in a step, and of its weights. A dash: not "
                "recorded.",
            ),
            Section(title="Loss", pictures=losses),
            Section(title="Speed, bytes and memory", pictures=list(_bars(rows))),
        ],
    )


def _overlay(
    name: str, curves: Mapping[str, Sequence[Point]], label: str, *, smooth: bool = False
) -> Picture:
    png = plots.plot_curves(curves, label, smooth=smooth)
    return Picture(name=name, png=png, alt=f"{label} of all runs over iterations")


def _bars(rows: Sequence[Figures]) -> list[Picture]:
    pictures = []
    for figure in ("iterations_per_second", "gathered_bytes", "weight_bytes", "peak_bytes"):
        values = {row.run: value for row in rows if (value := getattr(row, figure)) is not None}
        if not any(values.values()):
            continue
        unit = _MIB if figure.endswith("_bytes") else 1
        png = plots.plot_bars({run: value / unit for run, value in values.items()}, HEADER[figure])
        alt = f"{HEADER[figure]} of each run"
        pictures.append(Picture(name=figure.replace("_", "-"), png=png, alt=alt))
    return pictures


def _cells(row: Figures) -> list[str]:
    return [_spell(figure, getattr(row, figure)) for figure in HEADER]


def _spell(figure: str, value: str | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if figure.endswith("_bytes"):
        return f"{value / _MIB:,.2f}"
    if figure.endswith("loss"):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
