"""Tables of what upstream threads describe, from ``upstream_threads.yaml``."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

ROWS = Path(__file__).with_name("upstream_threads.yaml")
VERDICTS = ("works", "partly", "refused", "missing", "not applicable")
HEADER = ("what the thread describes", "what there is", "ran on", "shown by")
PLACES = ("CPU", "CPU/TE", "Hopper", "Blackwell (emulated)")


@cache
def threads() -> Mapping[str, list[Mapping[str, Any]]]:
    """Return the rows of every thread by its name."""
    rows: Mapping[str, list[Mapping[str, Any]]] = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return rows


def table_of(thread: str) -> str:
    """Return the rows of a thread as a table, whose cells have no spaces around them."""
    lines = [HEADER, ("---",) * len(HEADER), *map(_cells, threads()[thread])]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    note = f": {row['note']}" if "note" in row else ""
    links = (f"[{n}]({_place(name)})" for n, name in enumerate(row.get("shown", ()), start=1))
    return row["what"], f"**{row['here']}**{note}", ", ".join(row.get("ran", ())), " ".join(links)


def _place(name: str) -> str:
    """Return where a link leads: a file of results, or a test whose name is the fragment."""
    return (
        f"../recipes/results/{name}" if name.endswith(".json") else f"../{name.replace('::', '#')}"
    )


THREAD_TABLES: Mapping[str, Callable[[], str]] = {
    f"thread-{name}": partial(table_of, name) for name in threads()
}
