"""What benches share that measure row by row: the report before its first row, file and tables."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.timing import copy_bytes_per_ms, release
from moe_optim.commands.console.provenance import begin_report


def begin_rows(command: str, device: str) -> dict[str, Any]:
    """Return a report without rows: what was asked for, of which code, and the ceiling.

    Args:
        command: that asks for the same.
        device: ``cuda`` or ``cpu``; a copy on it is timed.
    """
    speed = copy_bytes_per_ms(device)
    release(device)
    start = begin_report(command, on_gpu=device == "cuda")
    return {**start, "copy_tb_per_s": round(speed / 1e9, 4), "rows": []}


def copy_speed(report: Mapping[str, Any]) -> float:
    """Return bytes read and written a millisecond by a plain copy."""
    return float(report["copy_tb_per_s"]) * 1e9


def fill_report(
    report: dict[str, Any],
    rows: Iterator[Any],
    path: Path | None,
    say: Callable[[Any], str],
) -> None:
    """Add rows as they are measured, each written to the file and said on stderr at once.

    Args:
        report: of ``begin_rows``; its rows are appended to.
        rows: measures while it is iterated.
        path: of the JSON; None writes none. A run that is cut short leaves what it has.
        say: returns the line that tells of a row.
    """
    progress = Console(stderr=True, markup=False, highlight=False)
    for row in rows:
        report["rows"].append(row)
        if path:
            path.write_text(json.dumps(report, indent=2) + "\n")
        progress.print(say(row), soft_wrap=True)


def table_of_rows(
    title: str, headings: Mapping[str, str], rows: Iterable[Any], texts: Collection[str]
) -> Table:
    """Return rows as a table; what a row lacks is a dash.

    Args:
        title: above it; the machine follows it.
        headings: field of a row -> heading.
        rows: as they were measured.
        texts: fields that are words and not numbers.
    """
    table = Table(title=title, title_justify="left")
    for name, heading in headings.items():
        is_text = name in texts
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in headings))
    return table


def machine(report: Mapping[str, Any]) -> str:
    """Return what was measured on, for a title."""
    return f"{report['device']}, copy {report['copy_tb_per_s']} TB/s"
