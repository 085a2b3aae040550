"""Plots of the documents, drawn from ``recipes/results``."""

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.documents.measured_tables import (
    CONVERGENCE,
    EXPERT_PARALLEL_STEP,
    FUSED,
    GRAPHED,
    MUON_CONVERGENCE,
    SIDES,
    SMOOTHED,
    STEPS,
    TENSORWISE_STEP,
    distances,
    last_held_out,
    read_result,
    runs_by_side,
    runs_of_common_seeds,
    spelt,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

FOLDER = Path(__file__).parents[2] / "docs" / "images"
STOCK, OURS, INK = "#b8c4ce", "#0f7f6c", "#26323b"
NAMES = ("Megatron", "moe_optim")
_KEY = "Drawn from"
"""Metadata key of a PNG for the hash of its data."""

Bars = dict[str, dict[str, float]]


PICTURED_STEPS = {
    "2 H200, Qwen3-30B-A3B's experts": EXPERT_PARALLEL_STEP,
    "1 H200, per-tensor scaling": TENSORWISE_STEP,
    "1 H200": FUSED,
    "1 H200, as a CUDA graph": GRAPHED[0],
    **{label: f"step-{name}.json" for name, label in STEPS.items()},
}
"""Label of a pair of bars -> result file."""


def step_figures() -> Bars:
    """Return machine -> time of ``optimizer.step()`` in ms, Megatron's and the plug-in's."""
    return {
        label: {side: read_result(file)[side]["optimizer_ms"] for side in SIDES}
        for label, file in PICTURED_STEPS.items()
    }


def draw_step_time(figures: Mapping[str, Bars]) -> "Figure":
    """Draw the time of a step beside that of Megatron in the same format."""
    steps = figures["steps"]
    times = [bars["stock"] / bars["plugin"] for bars in steps.values()]
    if [round(min(times)), round(max(times))] != [3, 10]:
        raise ValueError(f"the title is not what the figures say: {times}")
    figure = _new_figure(4.8)
    _draw_steps(figure.subplots(), steps)
    _set_title(figure, "optimizer.step() runs 3 to 10 times faster")
    return figure


def _new_figure(height: float) -> "Figure":
    """Return a figure whose text is legible at the width of a phone and of a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, height), dpi=220, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    return figure


def _set_title(figure: "FigureBase", title: str) -> None:
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, weight="bold", color=INK)


def _draw_steps(axes: "Axes", steps: Bars) -> None:
    height, widest = 0.4, max(bars["stock"] for bars in steps.values())
    for place, bars in enumerate(steps.values()):
        for offset, side, color in ((-0.5, "stock", STOCK), (0.5, "plugin", OURS)):
            y = place + offset * height
            axes.barh(y, bars[side], height=height, color=color)
            said, weight = f"{bars[side]:.0f} ms", "normal"
            if side == "plugin":
                said += f", {bars['stock'] / bars['plugin']:.1f}x faster"
                weight = "bold"
            axes.text(
                bars[side] + 0.012 * widest,
                y,
                said,
                va="center",
                fontsize=10,
                weight=weight,
                color=INK,
            )
    axes.set_yticks(range(len(steps)), [name.replace(", ", ",\n", 1) for name in steps])
    axes.tick_params(axis="y", length=0, labelsize=10, colors=INK)
    axes.set_xticks([])
    axes.set_xlabel(
        "Blockwise FP8 unless noted, the same on both sides", loc="right", fontsize=10, color=INK
    )
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_xlim(0, 1.12 * widest)
    axes.legend(
        handles=[axes.patches[0], axes.patches[1]],
        labels=["Megatron 0.19", "moe_optim"],
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),  # above the axes
        ncols=2,
        columnspacing=1.2,
        frameon=False,
        fontsize=10,
    )


def draw_convergence(figures: Mapping[str, Any]) -> "Figure":
    """Draw the losses of 300 steps with Adam."""
    title = "300 steps in blockwise FP8:\nmoe_optim is closer to Megatron than another seed"
    return _draw_losses(figures["losses"], figures["distances"], title)


def draw_muon_convergence(figures: Mapping[str, Any]) -> "Figure":
    """Draw the losses of 300 steps with Muon, whose weights are bf16 in stock."""
    title = "300 steps of Muon in blockwise FP8:\nmoe_optim is closer to Megatron than another seed"
    return _draw_losses(figures["muon_losses"], figures["muon_distances"], title)


def _draw_losses(
    rows: Sequence[Mapping[str, Any]], distances: Mapping[str, Any], title: str
) -> "Figure":
    """Draw the losses of both sides, and their difference beside that of two seeds."""
    figure = _new_figure(5.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    seeds = " and ".join(str(row["seed"]) for row in rows)
    for number, row in enumerate(rows):
        first = number == 0  # both seeds have one row of the legend
        stock, ours = (f"{side}, seeds {seeds}" if first else None for side in NAMES)
        upper.plot(row["stock"], color=STOCK, linewidth=4, label=stock)
        upper.plot(row["plugin"], color=OURS, linewidth=1, label=ours)
    _set_panel_title(upper, "Loss, nats per token")
    for (name, values), color in zip(distances.items(), (OURS, "#6fb7a8", STOCK), strict=True):
        lower.plot(values, color=color, linewidth=1.5, label=name)
    lower.set_yscale("log")
    lower.set_ylim(bottom=0.03 * lower.get_ylim()[0])  # room for the legend
    _set_panel_title(lower, f"Distance from Megatron, means of {SMOOTHED} losses")
    lower.set_xlabel("iteration", color=INK)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, labelspacing=0.2, borderaxespad=0.0)
    _set_title(figure, title)
    return figure


def _set_panel_title(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)


def draw_formats(figures: Mapping[str, Any]) -> "Figure":
    """Draw held-out losses of all sides, averaged over common seeds, and final losses by seed."""
    from matplotlib import colormaps

    figure = _new_figure(6.4)
    above, below = figure.subfigures(2, 1, height_ratios=(2, 3))
    upper, lower = above.subplots(), below.subplots()
    colors = (INK, *colormaps["tab10"].colors, *colormaps["Dark2"].colors)
    for (side, curves), color in zip(figures["held_out"].items(), colors, strict=False):
        iterations = [iteration for iteration, _ in curves[0]]
        losses = [[loss for _, loss in curve] for curve in curves]
        means = [sum(of_seeds) / len(of_seeds) for of_seeds in zip(*losses, strict=True)]
        upper.plot(iterations, means, color=color, linewidth=1.5)
        last = figures["last"][side]
        lower.plot(last, [side] * len(last), "o", color=color, markersize=7)
    upper.set_ylim(0.95, 2.6)
    upper.set_xlabel("iteration", color=INK)
    _set_title(above, "Held-out loss, nats per byte, means of two seeds")
    lower.invert_yaxis()
    lower.grid(axis="y", color="0.92")
    _set_title(below, "Mean of the last five, one point per seed")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES: Mapping[str, Callable[[Mapping[str, Any]], "Figure"]] = {
    "convergence.png": draw_convergence,
    "convergence-muon.png": draw_muon_convergence,
    "formats.png": draw_formats,
    "step-time.png": draw_step_time,
}


def figures_of_pictures() -> dict[str, Any]:
    sides = runs_by_side()
    return {
        "steps": step_figures(),
        "losses": read_result(CONVERGENCE)["rows"],
        "distances": distances(),
        "muon_losses": read_result(MUON_CONVERGENCE)["rows"],
        "muon_distances": distances(MUON_CONVERGENCE),
        "held_out": {
            spelt(side): [row["held_out"] for row in runs]
            for side, runs in runs_of_common_seeds().items()
        },
        "last": {spelt(side): [last_held_out(row) for row in runs] for side, runs in sides.items()},
    }


def digest() -> str:
    return hashlib.sha256(json.dumps(figures_of_pictures()).encode()).hexdigest()


def is_current(name: str) -> bool:
    """Return whether a plot was drawn from the current data.

    Compares data, not bytes, since these depend on the version of matplotlib.
    """
    from PIL import Image

    path = FOLDER / name
    if not path.exists():
        return False
    with Image.open(path) as image:
        return image.info.get(_KEY) == digest()


def write_picture(name: str) -> Path:
    png = io.BytesIO()
    PICTURES[name](figures_of_pictures()).savefig(png, format="png", metadata={_KEY: digest()})
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(png.getvalue())
    return path
