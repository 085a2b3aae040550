"""The tables of a plan: groups of columns, side by side where a terminal is wide enough.

Each group is less than 60 columns wide, and no number is ever cut.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moe_optim.commands.plan.answers import bytes_left
from moe_optim.commands.plan.costs import STOCK_BF16
from moe_optim.spelling import spell_bytes, spell_count, spell_difference

Row = Mapping[str, Any]
NOTHING = "-"

LEGEND = {
    "weights": "data and scales of both directions, as stored",
    "grads": "the gradient buffer (main_grad)",
    "optimizer": "main params, exp_avg and exp_avg_sq; main params take 4 bytes, and 2 in stock "
    "bf16 with --use-precision-aware-optimizer",
    "step": "fp32 copies that a step makes of bf16 gradients",
    "total": "their sum, of expert weights alone: dense weights and activations come on top",
    "vs bf16, vs stock": "total, less that of stock Megatron in bf16, or in the same format",
    "all-gather": "what a rank holds of a parameter all-gather, its own shard included",
    "of bf16": "as a part of what stock bf16 gathers",
    "kernels": "launches of a step that quantize, find maxima or derive copies; - is not counted",
}
DETAILS = {
    "max/mean": "elements that ranks own",
    "path": "aligned: no block lies on two ranks. partial amax: some do, and ranks exchange "
    "maxima. bf16 wire: weights travel in bf16. by weight: Megatron quantizes one weight after the "
    "other",
    "amaxes": "fp32 maxima that ranks reduce before they encode",
    "norm, update": "bytes that a fused step of experts reads and writes at least, for the "
    "gradient norm and for Adam with the quantization; nvfp4 reads masters once more",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of each row."""

    header: str
    width: int
    spell: Callable[[Row], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What was asked for."""

    gpu_memory: float | None
    """GiB of a GPU."""
    network_gb_per_s: float | None
    memory_tb_per_s: float | None
    details: bool


def legend(shown: Shown, rows: Sequence[Row]) -> str:
    """Return what the columns mean that are shown."""
    words = {**LEGEND, **(DETAILS if shown.details else {})}
    if not _takes_memory(rows):
        del words["step"]
    return " ".join(f"{name}: {meaning}." for name, meaning in words.items())


def build_tables(title: str, rows: Sequence[Row], shown: Shown, width: int) -> Iterator[Table]:
    """Yield tables of the rows of one number of GPUs, each as wide as ``width`` allows."""
    groups = _groups(rows, shown)
    while groups:
        columns = groups.pop(0)
        while groups and _width([*columns, *groups[0]]) <= width:
            columns = [*columns, *groups.pop(0)]
        yield _table(title, columns, rows)
        title = ""


def _groups(rows: Sequence[Row], shown: Shown) -> list[list[Column]]:
    step = [_bytes("step", "step_memory_bytes_per_rank")] if _takes_memory(rows) else []
    memory = [
        _bytes("weights", "weight_bytes_per_rank"),
        _bytes("grads", "gradient_bytes_per_rank"),
        _bytes("optimizer", "optimizer_bytes_per_rank", 9),
        *step,
    ]
    total = _bytes("total", "total_bytes_per_rank")
    (bf16,) = (row for row in rows if row["format"] == STOCK_BF16)
    gather = [
        _bytes("all-gather", "gathered_bytes_per_step", 10),
        Column("of bf16", 7, lambda row: f"{_share(row, bf16):.2f}"),
        *_times("gather_ms", shown.network_gb_per_s, "GB/s"),
        Column("kernels", 7, lambda row: _number(row["launches_per_step"])),
    ]
    groups = [memory, [total, *_differences(), *_fits(shown.gpu_memory)], gather]
    if shown.details:
        groups.append(_DETAILS)
    has_steps = any(row["norm_bytes_per_rank"] is not None for row in rows)
    if has_steps and (shown.details or shown.memory_tb_per_s is not None):
        groups.append([*_STEP, *_times("step_floor_ms", shown.memory_tb_per_s, "TB/s")])
    return groups


def _bytes(header: str, key: str, width: int = 8) -> Column:
    return Column(header, width, lambda row: NOTHING if row[key] is None else spell_bytes(row[key]))


def _number(number: int | None) -> str:
    return NOTHING if number is None else str(number)


def _share(row: Row, bf16: Row) -> float:
    return float(row["gathered_bytes_per_step"] / bf16["gathered_bytes_per_step"])


def _times(key: str, speed: float | None, unit: str) -> list[Column]:
    """Return a column of milliseconds, if a speed is known."""
    if speed is None:
        return []
    header = f"at {speed:g} {unit}"

    def spell(row: Row) -> str:
        if row[key] is None:
            return NOTHING
        return f"{row[key]:,.3f} ms" if row[key] else "none"

    return [Column(header, max(12, len(header)), spell)]


def _differences() -> list[Column]:
    def column(header: str, key: str) -> Column:
        return Column(
            header, 9, lambda row: NOTHING if row[key] is None else spell_difference(row[key])
        )

    return [
        column("vs bf16", "against_stock_bf16_bytes"),
        column("vs stock", "against_stock_bytes"),
    ]


def _fits(gpu_memory: float | None) -> list[Column]:
    if gpu_memory is None:
        return []

    def spell(row: Row) -> str:
        left = bytes_left(row, gpu_memory)
        return f"yes, {spell_bytes(left)}" if left >= 0 else f"no, -{spell_bytes(-left)}"

    header = f"fits {gpu_memory:g} GiB"
    return [Column(header, max(13, len(header)), spell)]


_DETAILS = [
    Column("padding", 7, lambda row: f"{row['padding_fraction']:.2%}"),
    Column("max/mean", 8, lambda row: f"{row['shard_imbalance']:.3f}"),
    Column("path", 12, lambda row: str(row["path"])),
    Column("amaxes", 7, lambda row: spell_count(row["exchanged_maxima"])),
]
_STEP = [
    _bytes("norm", "norm_bytes_per_rank"),
    _bytes("update", "update_bytes_per_rank"),
    Column(
        "B/param",
        7,
        lambda row: (
            NOTHING
            if row["step_bytes_per_parameter"] is None
            else f"{row['step_bytes_per_parameter']:.2f}"
        ),
    ),
]
_FORMAT = Column("format", 15, lambda row: str(row["format"]))


def _takes_memory(rows: Sequence[Row]) -> bool:
    return any(row["step_memory_bytes_per_rank"] for row in rows)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + 1 for column in (_FORMAT, *columns)) - 1


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
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
        table.add_row(*(column.spell(row) for column in (_FORMAT, *columns)))
    return table
