"""The tables of a plan: column groups, side by side if the terminal is wide enough.

Each group is less than 60 columns wide, and no number is truncated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from moe_optim.commands.console.tables import build_table
from moe_optim.commands.plan.answers import bytes_left
from moe_optim.commands.plan.costs import STOCK_BF16
from moe_optim.commands.plan.rows import PlanRow
from moe_optim.spelling import spell_bytes, spell_difference

NOTHING = "-"


class Column(NamedTuple):
    """One column of a table."""

    header: str
    width: int
    key: str
    spell: Callable[[Any], str] = str


_FORMAT = Column("format", 15, "format")


def build_tables(
    title: str, report: Mapping[str, Any], rows: Sequence[PlanRow], width: int, *, details: bool
) -> Iterator[Table]:
    """Yield tables of the rows of one number of GPUs, each at most ``width`` wide."""
    groups = _groups(report, rows, details=details)
    while groups:
        columns = groups.pop(0)
        while groups and _width([*columns, *groups[0]]) <= width:
            columns = [*columns, *groups.pop(0)]
        yield _table(title, columns, rows)
        title = ""


def _groups(
    report: Mapping[str, Any], rows: Sequence[PlanRow], *, details: bool
) -> list[list[Column]]:
    (bf16,) = (row["gathered_bytes_per_step"] for row in rows if row["format"] == STOCK_BF16)
    has_stock = any(row["against_stock_bytes"] is not None for row in rows)
    is_counted = rows[0]["model_bytes_per_rank"] is not None
    memory = [
        _bytes("experts", "total_bytes_per_rank"),
        *[_bytes("model", "model_bytes_per_rank")] * is_counted,
        Column("vs bf16", 9, "against_stock_bf16_bytes", spell_difference),
        *[Column("vs stock", 9, "against_stock_bytes", spell_difference)] * has_stock,
    ]
    gather = [
        _bytes("all-gather", "gathered_bytes_per_step", 10),
        Column("of bf16", 7, "gathered_bytes_per_step", lambda count: f"{count / bf16:.2f}"),
    ]
    if (link := rows[0]["link_gb_per_s"]) is not None:
        header = f"at {link:g} GB/s"
        gather.append(Column(header, max(12, len(header)), "gather_ms", _spell_ms))
    fits = _fits(report["gpu_memory_gib"]) if is_counted else []
    step = [Column("step", 13, "step_ms", _spell_range)] * any(row["step_ms"] for row in rows)
    copies = any(row["step_memory_bytes_per_rank"] for row in rows)
    further = [
        _bytes("weights", "weight_bytes_per_rank"),
        _bytes("grads", "gradient_bytes_per_rank"),
        _bytes("optimizer", "optimizer_bytes_per_rank", 9),
        *[_bytes("copies", "step_memory_bytes_per_rank")] * copies,
        Column("padding", 7, "padding_fraction", "{:.2%}".format),
    ]
    return [group for group in (memory, [*fits, *step], gather, further * details) if group]


def _bytes(header: str, key: str, width: int = 8) -> Column:
    return Column(header, width, key, spell_bytes)


def _spell_ms(time: float) -> str:
    if not time:
        return "none"
    return f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms"


def _spell_range(step: tuple[float, float]) -> str:
    least, most = (f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}" for ms in step)
    return f"{least} to {most} ms" if least != most else f"{least} ms"


def _fits(gpu_memory: float | None) -> list[Column]:
    if gpu_memory is None:
        return []

    def spell(total: int) -> str:
        left = bytes_left(total, gpu_memory)
        return f"yes, {spell_bytes(left)}" if left >= 0 else f"no, -{spell_bytes(-left)}"

    header = f"fits {gpu_memory:.4g} GiB"
    return [Column(header, max(13, len(header)), "model_bytes_per_rank", spell)]


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + 1 for column in (_FORMAT, *columns)) - 1


def _table(title: str, columns: Sequence[Column], rows: Sequence[PlanRow]) -> Table:
    shown = [_FORMAT, *columns]
    numbers = [column.header for column in columns]
    cells = [
        [NOTHING if row[one.key] is None else one.spell(row[one.key]) for one in shown]
        for row in rows
    ]
    table = build_table([column.header for column in shown], cells, right=numbers)
    for column, of_table in zip(shown, table.columns, strict=True):
        of_table.width = column.width
    table.title, table.title_justify, table.title_style = title and f"\n{title}", "left", "bold"
    return table
