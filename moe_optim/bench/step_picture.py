"""The parts of a training step of both sides, stacked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe_optim.bench.step_figures import PARTS, SIDES, title_of
from moe_optim.console.pictures import png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "forward_backward_ms": "#c8d3dc",
    "grad_copy_ms": "#b3dcf5",
    "grad_norm_ms": "#56b4e9",
    "inner_step_ms": "#009e73",
    "requantize_ms": "#d55e00",
    "gather_ms": "#e69f00",
    "post_processing_ms": "#cc79a7",
    "optimizer_rest_ms": "#7f7f7f",
}
_READABLE = 0.04
"""Part of the width that a number needs to stand inside a bar."""


def draw(report: dict[str, Any]) -> bytes:
    """Draw the iteration, and below on its own scale what surrounds both passes; return a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1)
    update = [key for key in PARTS if key != "forward_backward_ms"]
    iteration = {side: report[side]["iteration_ms"] or 0.0 for side in SIDES}
    _draw_bars(above, report, list(PARTS), iteration)
    above.set_title("Iteration, ms", loc="left", fontsize=10)
    sums = {side: sum(report[side][key] or 0.0 for key in update) for side in SIDES}
    _draw_bars(below, report, update, sums)
    below.set_title("The same without forward and backward, ms", loc="left", fontsize=10)
    entries = [Patch(color=_COLORS[key], label=part.label) for key, part in PARTS.items()]
    entries.append(Patch(facecolor="white", edgecolor="0.6", label="outside of these parts"))
    figure.legend(handles=entries, loc="outside right center", frameon=False, fontsize=9)
    title = f"Parts of a training step, medians. {title_of(report)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return png_of(figure)


def _draw_bars(
    axes: "Axes", report: dict[str, Any], keys: list[str], totals: Mapping[str, float]
) -> None:
    """Draw a bar a side, up to its total, which is written behind it.

    Parts and totals are medians of different iterations: the sum of parts may exceed the total.
    """
    ends = {
        side: max(totals[side], sum(report[side][key] or 0.0 for key in keys)) for side in SIDES
    }
    width = 1.12 * max(*ends.values(), 1e-9)
    for row, side in enumerate(SIDES):
        left = 0.0
        for key in keys:
            value = report[side][key] or 0.0
            axes.barh(row, value, left=left, height=0.7, color=_COLORS[key])
            if value > _READABLE * width:
                axes.text(left + value / 2, row, f"{value:.1f}", ha="center", va="center")
            left += value
        rest = ends[side] - left
        axes.barh(row, rest, left=left, height=0.7, facecolor="white", edgecolor="0.6")
        axes.text(ends[side] + 0.01 * width, row, f"{totals[side]:.1f}", va="center", weight="bold")
    axes.set_xlim(0, width)
    axes.set_yticks(range(len(SIDES)), list(SIDES.values()))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
