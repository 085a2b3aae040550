"""Reports of benchmarks that measure row by row: header, file and tables."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import begin_report
from benchmarks.timing import copy_bytes_per_ms, release
from moe_optim.errors import ConfigError


def begin_rows(command: str, device: str) -> dict[str, Any]:
    """Return a report without rows: command, versions, and copy speed on ``cuda`` or ``cpu``."""
    speed = copy_bytes_per_ms(device)
    release(device)
    start = begin_report(command, on_gpu=device == "cuda")
    return {**start, "copy_tb_per_s": round(speed / 1e9, 4), "rows": []}


def choose_device(given: str | None) -> str:
    """Return ``given``, or ``cuda`` if available; ConfigError for ``cuda`` without a GPU."""
    import torch

    device = given or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: expected a CUDA GPU, got none. Give --device cpu.")
    return device


def copy_speed(report: Mapping[str, Any]) -> float:
    """Return the speed of a plain copy, in bytes read plus written per ms."""
    return float(report["copy_tb_per_s"]) * 1e9


def fill_report(
    report: dict[str, Any],
    rows: Iterator[Any],
    path: Path | None,
    say: Callable[[Any], str],
) -> None:
    """Append measured rows to a ``begin_rows`` report, printing each to stderr.

    ``path``, unless None, is rewritten after every row, so that an interrupted run keeps its rows.
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
    """Return rows as a table; missing values are dashes.

    ``headings`` map fields to headings; ``texts`` are fields that are not numbers. The machine
    follows ``title``.
    """
    table = Table(title=title, title_justify="left")
    for name, heading in headings.items():
        is_text = name in texts
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in headings))
    return table


def machine(report: Mapping[str, Any]) -> str:
    """Return the measured machine, for a title."""
    return f"{report['device']}, copy {report['copy_tb_per_s']} TB/s"
