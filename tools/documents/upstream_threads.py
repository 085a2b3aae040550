"""Lists of what upstream threads describe, from ``upstream_threads.yaml``."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

ROWS = Path(__file__).with_name("upstream_threads.yaml")
VERDICTS = ("works", "partly", "refused", "missing", "not applicable")
PLACES = ("CPU", "CPU/TE", "Hopper", "Blackwell (emulated)")


@cache
def threads() -> Mapping[str, list[Mapping[str, Any]]]:
    """Return the rows of every thread by its name."""
    rows: Mapping[str, list[Mapping[str, Any]]] = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return rows


def rows_of(thread: str) -> str:
    return "\n".join(map(_item, threads()[thread]))


def _item(row: Mapping[str, Any]) -> str:
    """Return a row as an item of a list, each piece of evidence on a line of its own."""
    note = f": {row['note']}" if "note" in row else ""
    verdict = f"- {row['what']}: **{row['here']}**{note}"
    if not row.get("shown"):
        return f"{verdict}."
    return f"{verdict}. {', '.join(row['ran'])}:<br>{'<br>'.join(map(_link, row['shown']))}"


def _link(name: str) -> str:
    return f"[`{name}`](../recipes/results/{name})" if name.endswith(".json") else f"`{name}`"


THREAD_TABLES: Mapping[str, Callable[[], str]] = {
    f"thread-{name}": partial(rows_of, name) for name in threads()
}
