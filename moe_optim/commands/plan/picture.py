"""The plot of a plan: memory against the number of GPUs, weights and all-gather by format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optim.commands.console.pictures import picture_of, plain
from moe_optim.commands.plan.answers import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "mxfp8": "#0072b2",
    "mxfp8_2d": "#d55e00",
    "nvfp4": "#009e73",
    "fp8_block": "#aa4499",
    "fp8_block_fp32": "#cc79a7",
    "mxfp8_rows": "#56b4e9",
    "mxfp4": "#e69f00",
    "nvfp4_rows": "#66c2a5",
    "int4": "#8c510a",
    "int4_g128": "#bf812d",
}
"""Color of a format, managed and stock; stock bf16 is black."""
_TOTAL = "total_bytes_per_rank"


def draw_plan(report: Mapping[str, Any], path: Path) -> bytes:
    """Draw a plan and encode it in the file type of ``path``'s suffix."""
    from matplotlib.figure import Figure

    rows: Sequence[Mapping[str, Any]] = report["rows"]
    figure = Figure(figsize=(13, 5), dpi=150, layout="constrained")
    memory, weights, gather = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    most_bytes = max(row[_TOTAL] for row in rows)
    unit, spelt = (GIB, "GiB") if most_bytes >= GIB else (2**20, "MiB")
    _draw_memory(memory, rows, unit, report["gpu_memory_gib"])
    memory.set_ylabel(spelt)
    most = max(row["gpus"] for row in rows)
    at_most = [row for row in rows if row["gpus"] == most]
    where = f"at {most:,} GPU{'s' * (most > 1)}"
    for axes, title, key in (
        (weights, "Expert weights of a rank", "weight_bytes_per_rank"),
        (gather, "Parameter all-gather", "gathered_bytes_per_step"),
    ):
        _draw_bars(axes, {row["format"]: row[key] / unit for row in at_most})
        axes.set_title(f"{title} {where}", loc="left", fontsize=10)
        axes.set_xlabel(spelt)
    figure.suptitle(
        f"{plain(report['planned'])}\nsolid: moe_optim; dashed or hatched: stock Megatron",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return picture_of(figure, path)


def _look(name: str) -> tuple[str, bool]:
    return _COLORS.get(name.removeprefix("stock "), "black"), name.startswith("stock ")


def _draw_memory(
    axes: "Axes", rows: Sequence[Mapping[str, Any]], unit: int, gpu_memory: float | None
) -> None:
    from matplotlib.ticker import NullLocator

    gpus = sorted({row["gpus"] for row in rows})
    for name in dict.fromkeys(row["format"] for row in rows):
        values = [row[_TOTAL] / unit for row in rows if row["format"] == name]
        color, is_stock = _look(name)
        label = f"{name}: {values[-1]:#.3g}"
        line, width = ("x--", 1.2) if is_stock else ("o-", 5)  # stock is drawn on top
        alpha = 1 if is_stock else 0.4
        axes.plot(gpus, values, line, linewidth=width, color=color, alpha=alpha, label=label)
    if gpu_memory is not None:
        axes.axhline(gpu_memory * GIB / unit, color="0.3", linewidth=1, linestyle=":")
        axes.text(gpus[0], gpu_memory * GIB / unit, f"a GPU: {gpu_memory:g} GiB", va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus], fontsize=9, rotation=40)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_title("Experts of a rank: weights, gradients, optimizer", loc="left", fontsize=10)
    axes.set_xlabel("GPUs in all")
    axes.legend(fontsize=8, title=f"at {gpus[-1]:,} GPUs" if len(gpus) > 1 else None)


def _draw_bars(axes: "Axes", values: Mapping[str, float]) -> None:
    for name, value in values.items():
        color, is_stock = _look(name)
        face, hatch = ("white", "///") if is_stock else (color, None)
        bars = axes.barh(name, value, height=0.7, color=face, edgecolor=color, hatch=hatch)
        axes.bar_label(bars, [f"{value:#.3g}"], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(right=1.2 * max(values.values()))
