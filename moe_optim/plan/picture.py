"""The picture of a plan: bytes against the number of GPUs, a line a format."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from moe_optim.console.pictures import png_of
from moe_optim.console.spelling import spell_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "resident_bytes_per_rank": "resident on a rank",
    "gathered_bytes_per_step": "gathered by a rank in a step",
}
_LINES = {  # format -> color, width: what lies on another line is thinner, and both can be seen
    "mxfp8": ("#0072b2", 5.0),
    "mxfp8_2d": ("#e69f00", 5.0),
    "nvfp4": ("#009e73", 2.2),
    "fp8_block": ("#cc79a7", 2.2),
    "stock mxfp8": ("0.65", 1.6),
    "stock bf16": ("0.1", 0.8),
}
_SAME = 1.05
"""Neighbours that end so close to each other share a label."""

Row = dict[str, Any]


def draw_plan(rows: Sequence[Row], what: str) -> bytes:
    """Draw the rows of a plan, of ``what``, on logarithmic axes; return a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    for axes, key in zip(panels, PANELS, strict=True):
        _draw_panel(axes, rows, key)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"Expert weights: {what}", x=0.01, ha="left", fontsize=11)
    return png_of(figure)


def _draw_panel(axes: "Axes", rows: Sequence[Row], key: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    gpus = sorted({row["gpus"] for row in rows})
    ends = {}
    for name, (color, width) in _LINES.items():
        values = [row[key] for row in rows if row["format"] == name]
        ends[name] = values[-1]
        style: dict[str, Any] = {
            "color": color,
            "linewidth": width,
            "markersize": width + 2,
            "label": name,
        }
        dashes = "--" if name.startswith("stock") else "-"
        axes.plot(gpus, values, linestyle=dashes, marker="o", **style)
    for value, names in _group(ends):
        axes.annotate(
            "\n".join(names),
            (gpus[-1], value),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [f"{count:,}" for count in gpus]
    axes.set_xticks(gpus, ticks, fontsize=8, rotation=40, ha="right", rotation_mode="anchor")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: spell_bytes(count)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("GPUs")
    axes.set_title(PANELS[key], loc="left", fontsize=10)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _group(ends: Mapping[str, float]) -> list[tuple[float, list[str]]]:
    """Return the heights of labels, and the lines that each of them names."""
    groups: list[dict[str, float]] = []
    for name, value in sorted(ends.items(), key=lambda end: -end[1]):
        if groups and min(groups[-1].values()) / value < _SAME:
            groups[-1][name] = value
        else:
            groups.append({name: value})
    return [(geometric_mean(group.values()), list(group)) for group in groups]
