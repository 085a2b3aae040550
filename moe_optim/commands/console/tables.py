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
    """Return a table, without a header line if all ``columns`` are empty.

    Columns in ``right`` are aligned there; cells of columns in ``fold`` wrap, others stay whole.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=any(columns))
    for name in columns:
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=side, no_wrap=name not in fold, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
