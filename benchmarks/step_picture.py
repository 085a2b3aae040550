"""Draws the parts of a training step as stacked bars, for both sides."""

import argparse
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.step_figures import FIGURES, PARTS, REST, SIDES, rest_of, sides_of, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
"""Supported suffixes."""


def picture_path(text: str) -> Path:
    """Parse the path of a plot; an argparse ``type``.

    Raises:
        argparse.ArgumentTypeError: the suffix is not in :data:`KINDS`.
    """
    path = Path(text)
    if path.suffix.lower() not in KINDS:
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}, got '{text}'"
        )
    return path


_COLORS = {
    "forward_backward_ms": "#c8d3dc",
    "grad_copy_ms": "#b3dcf5",
    "grad_norm_ms": "#56b4e9",
    "inner_step_ms": "#009e73",
    "requantize_ms": "#d55e00",
    "gather_ms": "#e69f00",
    "post_processing_ms": "#cc79a7",
    "optimizer_rest_ms": "#7f7f7f",
    REST: "white",
}
_EDGES = {REST: "0.6"}
_TITLE = 130
"""Characters per title line."""
_READABLE = 0.04
"""Minimum fraction of the width for a number inside a bar."""


def draw(report: dict[str, Any], path: Path) -> bytes:
    """Draw the iteration and, below on a separate scale, the parts outside of both passes.

    The length of every bar equals the number after it.

    Returns:
        A picture in the format of ``path``'s suffix.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1)
    _draw_bars(above, report, [*PARTS, REST])
    above.set_title("Iteration, ms", loc="left", fontsize=10)
    _draw_bars(below, report, [key for key in PARTS if key != "forward_backward_ms"])
    below.set_title("The parts around forward and backward, ms", loc="left", fontsize=10)
    below.set_xlabel("ms")
    entries = [
        Patch(facecolor=color, edgecolor=_EDGES.get(key, color), label=FIGURES[key].label)
        for key, color in _COLORS.items()
    ]
    figure.legend(handles=entries, loc="outside right center", frameon=False, fontsize=9)
    title = "\n".join(textwrap.wrap(f"Parts of a step, medians. {title_of(report)}", _TITLE))
    figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", fontsize=10)
    return picture_of(figure, path)


def _draw_bars(axes: "Axes", report: dict[str, Any], keys: Sequence[str]) -> None:
    """Draw one bar of all parts per side, followed by their sum.

    Iteration time and parts are medians of different iterations: if the parts sum to more, there is
    no rest, and the iteration time is bracketed.
    """
    figures = {side: report[side] | {REST: rest_of(report[side])} for side in SIDES}
    lengths = {
        side: {key: max(of_side[key] or 0.0, 0.0) for key in keys}
        for side, of_side in figures.items()
    }
    width = 1.2 * max(*(sum(parts.values()) for parts in lengths.values()), 1e-9)
    for row, side in enumerate(SIDES):
        left = 0.0
        for key, value in lengths[side].items():
            color = _COLORS[key]
            edge = _EDGES.get(key, color)
            axes.barh(row, value, left=left, height=0.7, facecolor=color, edgecolor=edge)
            if value > _READABLE * width:
                axes.text(left + value / 2, row, f"{value:.1f}", ha="center", va="center")
            left += value
        said = f"{left:.1f}"
        if REST in keys and (figures[side][REST] or 0.0) < 0:
            said += f" (iteration {figures[side]['iteration_ms']:.1f})"
        axes.text(left + 0.01 * width, row, said, va="center", weight="bold")
    axes.set_xlim(0, width)
    axes.set_yticks(range(len(SIDES)), list(sides_of(report).values()))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def picture_of(figure: "Figure", path: Path) -> bytes:
    """Encode a figure in the file type of ``path``'s suffix."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower())
    return picture.getvalue()
