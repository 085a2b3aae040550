"""The picture of a plan: memory against the number of GPUs, weights and all-gather by format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optim.commands.console.pictures import picture_of, plain
from moe_optim.commands.plan.answers import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """How the line of a format looks: lines that lie on each other can all be seen."""

    color: str
    marker: str
    width: float
    dashes: tuple[float, tuple[float, ...]] | str = "-"
    alpha: float = 1.0

    @property
    def is_stock(self) -> bool:
        """Whether it is Megatron's own."""
        return self.dashes != "-"


_LINES = {  # a format and stock of it share a color; wide lines are pale, and lie below
    "mxfp8": Line("#0072b2", "o", 7.0, alpha=0.35),
    "mxfp8_2d": Line("#d55e00", "s", 7.0, alpha=0.35),
    "nvfp4": Line("#009e73", "^", 7.0, alpha=0.35),
    "fp8_block": Line("#aa4499", "D", 3.5, alpha=0.6),
    "stock bf16": Line("#000000", "x", 1.2, (0, (2, 6))),
    "stock mxfp8": Line("#0072b2", "o", 1.2, (4, (2, 6))),
    "stock nvfp4": Line("#009e73", "^", 1.2, (0, (4, 4))),
    "stock fp8_block": Line("#aa4499", "D", 1.2, (4, (4, 4))),
}
_TOTAL = "total_bytes_per_rank"
_MIB = 2**20
_GAP = 0.055
"""Between labels, as a part of the height of a panel."""


def draw_plan(report: Mapping[str, Any], path: Path) -> bytes:
    """Draw a plan; return a picture of the kind that ``path`` ends in."""
    from matplotlib.figure import Figure

    rows: Sequence[Row] = report["rows"]
    figure = Figure(figsize=(13, 5), dpi=150, layout="constrained")
    memory, weights, gather = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    most_bytes = max(row[_TOTAL] for row in rows)
    unit, spelt = (GIB, "GiB") if most_bytes >= GIB else (_MIB, "MiB")
    _draw_memory(memory, rows, unit)
    if report["gpu_memory_gib"] is not None:
        _draw_limit(memory, report["gpu_memory_gib"], unit)
    _draw_labels(memory, rows, unit)
    most = max(row["gpus"] for row in rows)
    at_most = [row for row in rows if row["gpus"] == most]
    where = f"at {most:,} GPU{'s' * (most > 1)}"
    _draw_bars(weights, at_most, "weight_bytes_per_rank", unit)
    weights.set_title(f"Expert weights of a rank {where}", loc="left", fontsize=10)
    _draw_bars(gather, at_most, "gathered_bytes_per_step", unit)
    gather.set_title(f"Parameter all-gather {where}", loc="left", fontsize=10)
    memory.set_ylabel(spelt)
    weights.set_xlabel(spelt)
    gather.set_xlabel(spelt)
    figure.suptitle(
        f"{plain(report['planned'])}\nsolid: moe_optim; dashed or hatched: stock Megatron",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return picture_of(figure, path)


def _draw_memory(axes: "Axes", rows: Sequence[Row], unit: int) -> None:
    from matplotlib.ticker import NullLocator

    gpus = sorted({row["gpus"] for row in rows})
    for name, line in _LINES.items():
        axes.plot(
            gpus,
            _values(rows, name, unit),
            color=line.color,
            alpha=line.alpha,
            linewidth=line.width,
            linestyle=line.dashes,
            marker=line.marker,
            markersize=line.width + 4,
            fillstyle="none" if line.is_stock else "full",
        )
    axes.set_xscale("log", base=2)
    ticks = [f"{count:,}" for count in gpus]
    axes.set_xticks(gpus, ticks, fontsize=9, rotation=40, ha="right", rotation_mode="anchor")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0, top=1.3 * max(row[_TOTAL] for row in rows) / unit)
    axes.set_title("Experts of a rank: weights, gradients, optimizer", loc="left", fontsize=10)
    axes.set_xlabel("GPUs in all")
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _values(rows: Sequence[Row], name: str, unit: int) -> list[float]:
    return [row[_TOTAL] / unit for row in rows if row["format"] == name]


def _draw_bars(axes: "Axes", rows: Sequence[Row], key: str, unit: int) -> None:
    for row in rows:
        line = _LINES[row["format"]]
        axes.barh(
            row["format"],
            row[key] / unit,
            color="white" if line.is_stock else line.color,
            edgecolor=line.color,
            hatch="///" if line.is_stock else None,
            height=0.7,
        )
        axes.annotate(
            f"{row[key] / unit:#.3g}",
            (row[key] / unit, row["format"]),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * max(row[key] for row in rows) / unit)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_limit(axes: "Axes", gpu_memory: float, unit: int) -> None:
    """Draw the memory of a GPU, in GiB."""
    limit = gpu_memory * GIB / unit
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.08 * limit))
    axes.axhline(limit, color="0.3", linewidth=1, linestyle=":")
    axes.annotate(
        f"a GPU: {gpu_memory:g} GiB",
        (0.01, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=9,
    )


def _draw_labels(axes: "Axes", rows: Sequence[Row], unit: int) -> None:
    """Name every line at its end, and lead from there to the name."""
    last = max(row["gpus"] for row in rows)
    ends = {name: _values(rows, name, unit)[-1] for name in _LINES}
    top = axes.get_ylim()[1]
    for name, height in spread(ends, _GAP * top).items():
        color = _LINES[name].color
        axes.annotate(
            f"{name}, {ends[name]:#.3g}",
            (last, ends[name]),
            xycoords="data",
            xytext=(1.1, height / top),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=color,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 6,
            },
        )


def spread(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Return heights in the same order that are apart by ``gap``, each as near as may be.

    Args:
        heights: where labels would lie best, 0 or more; the lowest may not lie below 0.
        gap: least distance of two.
    """
    groups: list[list[str]] = []  # labels that touch lie about their mean
    middles: list[float] = []

    def place(group: Sequence[str]) -> float:
        return max(sum(heights[name] for name in group) / len(group), gap * (len(group) - 1) / 2)

    for name in sorted(heights, key=lambda name: heights[name]):
        groups.append([name])
        middles.append(place(groups[-1]))
        while len(groups) > 1 and middles[-1] - middles[-2] < gap * (
            (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
            middles[-2:] = [place(groups[-1])]
    return {
        name: middle + gap * (index - (len(group) - 1) / 2)
        for group, middle in zip(groups, middles, strict=True)
        for index, name in enumerate(group)
    }
