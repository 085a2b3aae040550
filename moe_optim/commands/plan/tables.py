"""The tables of a plan: column groups, side by side if the terminal is wide enough.

Each group is less than 60 columns wide, and no number is truncated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moe_optim.commands.plan.answers import bytes_left
from moe_optim.commands.plan.costs import STOCK_BF16, PlanRow
from moe_optim.spelling import spell_bytes, spell_count, spell_difference

NOTHING = "-"

LEGEND = {
    "weights": "data and scales of every stored direction",
    "grads": "the gradient buffer (main_grad)",
    "optimizer": "main params of 4 bytes, exp_avg and exp_avg_sq, or Muon's momentum; with "
    "--use-precision-aware-optimizer, main params of stock bf16 use 2 bytes",
    "step": "fp32 copies that a step makes of bf16 gradients",
    "total": "sum of the above for expert weights; excludes dense weights and activations",
    "vs bf16, vs stock": "total minus that of stock Megatron in bf16, or in the same format",
    "all-gather": "bytes of a parameter all-gather on each rank, including its own shard",
    "of bf16": "fraction of the bytes that stock bf16 gathers",
    "kernels": "launches per step that quantize, compute maxima or derive copies; -: not counted",
}
DETAILS = {
    "max/mean": "imbalance of elements owned by ranks",
    "path": "aligned: no block spans two ranks. partial amax: some do, and ranks exchange maxima. "
    "bf16 wire: weights are gathered in bf16. by weight: Megatron quantizes weights one by one",
    "amaxes": "fp32 maxima that ranks reduce before encoding",
    "norm, update": "minimum bytes that a fused step of experts reads and writes, for the gradient "
    "norm and for Adam with quantization; formats with a global amax read masters twice",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    header: str
    width: int
    key: str
    spell: Callable[[Any], str] = str

    def cell(self, row: PlanRow) -> str:
        """Return the cell of a row as text."""
        return NOTHING if row[self.key] is None else self.spell(row[self.key])


_FORMAT = Column("format", 15, "format")


def legend(report: Mapping[str, Any], *, details: bool) -> str:
    """Return the legend of the shown columns."""
    words = {**LEGEND, **(DETAILS if details else {})}
    if not _copies_gradients(report["rows"]):
        del words["step"]
    return " ".join(f"{name}: {meaning}." for name, meaning in words.items())


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
    step = [_bytes("step", "step_memory_bytes_per_rank")] if _copies_gradients(rows) else []
    memory = [
        _bytes("weights", "weight_bytes_per_rank"),
        _bytes("grads", "gradient_bytes_per_rank"),
        _bytes("optimizer", "optimizer_bytes_per_rank", 9),
        *step,
    ]
    totals = [
        _bytes("total", "total_bytes_per_rank"),
        Column("vs bf16", 9, "against_stock_bf16_bytes", spell_difference),
        Column("vs stock", 9, "against_stock_bytes", spell_difference),
        *_fits(report["gpu_memory_gib"]),
    ]
    gather = [
        _bytes("all-gather", "gathered_bytes_per_step", 10),
        Column("of bf16", 7, "gathered_bytes_per_step", lambda count: f"{count / bf16:.2f}"),
        *_times("gather_ms", report["bandwidth_gb_per_s"], "GB/s"),
        Column("kernels", 7, "launches_per_step"),
    ]
    groups = [memory, totals, gather]
    if details:
        groups.append(
            [
                Column("padding", 7, "padding_fraction", "{:.2%}".format),
                Column("max/mean", 8, "shard_imbalance", "{:.3f}".format),
                Column("path", 12, "path"),
                Column("amaxes", 7, "exchanged_maxima", spell_count),
            ]
        )
    speed = report["memory_bandwidth_tb_per_s"]
    has_steps = any(row["norm_bytes_per_rank"] is not None for row in rows)
    if has_steps and (details or speed is not None):
        groups.append(
            [
                _bytes("norm", "norm_bytes_per_rank"),
                _bytes("update", "update_bytes_per_rank"),
                Column("B/param", 7, "step_bytes_per_parameter", "{:.2f}".format),
                *_times("step_floor_ms", speed, "TB/s"),
            ]
        )
    return groups


def _bytes(header: str, key: str, width: int = 8) -> Column:
    return Column(header, width, key, spell_bytes)


def _times(key: str, speed: float | None, unit: str) -> list[Column]:
    if speed is None:
        return []
    header = f"at {speed:g} {unit}"
    return [Column(header, max(12, len(header)), key, _spell_ms)]


def _spell_ms(time: float) -> str:
    return f"{time:,.3f} ms" if time else "none"


def _fits(gpu_memory: float | None) -> list[Column]:
    if gpu_memory is None:
        return []

    def spell(total: int) -> str:
        left = bytes_left(total, gpu_memory)
        return f"yes, {spell_bytes(left)}" if left >= 0 else f"no, -{spell_bytes(-left)}"

    header = f"fits {gpu_memory:g} GiB"
    return [Column(header, max(13, len(header)), "total_bytes_per_rank", spell)]


def _copies_gradients(rows: Sequence[PlanRow]) -> bool:
    return any(row["step_memory_bytes_per_rank"] for row in rows)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + 1 for column in (_FORMAT, *columns)) - 1


def _table(title: str, columns: Sequence[Column], rows: Sequence[PlanRow]) -> Table:
    table = Table(
        title=f"\n{title}".rstrip() if title else None,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in (_FORMAT, *columns):
        side: Any = "left" if column.header in ("format", "path") else "right"
        table.add_column(column.header, justify=side, no_wrap=True, width=column.width)
    for row in rows:
        table.add_row(*(column.cell(row) for column in (_FORMAT, *columns)))
    return table
