"""Tables of what upstream threads describe, from ``upstream_threads.yaml``."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from tools.documents.code_tables import table

ROWS = Path(__file__).with_name("upstream_threads.yaml")
VERDICTS = ("works", "partly", "refused", "missing", "not applicable")
PLACES = ("CPU", "CPU with Transformer Engine", "Hopper", "compiled for Blackwell")


@cache
def threads() -> Mapping[str, list[Mapping[str, Any]]]:
    """Return the rows of every thread by its name."""
    rows: Mapping[str, list[Mapping[str, Any]]] = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return rows


def rows_of(thread: str) -> str:
    return table(
        ["described", "here", "shown by", "ran on"],
        (
            [
                row["what"],
                ": ".join(filter(None, (row["here"], row.get("note")))),
                "<br>".join(map(_evidence, row.get("shown", []))),
                ", ".join(row.get("ran", ["not run"] if row["here"] == "missing" else [])),
            ]
            for row in threads()[thread]
        ),
    )


def _evidence(name: str) -> str:
    return f"[`{name}`](../recipes/results/{name})" if name.endswith(".json") else f"`{name}`"


THREAD_TABLES: Mapping[str, Callable[[], str]] = {
    f"thread-{name}": partial(rows_of, name) for name in threads()
}
