"""Tables without lines, whose numbers are never cut off."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text


def build_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    fold: Collection[str] = (),
    gap: int = 1,
) -> Table:
    """Return a table.

    Args:
        columns: headers; no header line if all are empty.
        rows: cells.
        right: headers of columns aligned on the right.
        fold: headers of columns whose cells wrap; others stay whole.
        gap: blanks between columns.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=any(columns))
    for name in columns:
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=side, no_wrap=name not in fold, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
