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
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "images"
STOCK, OURS, INK = "#b8c4ce", "#0f7f6c", "#26323b"
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = figures["steps"]
    times = [bars["stock"] / bars["plugin"] for bars in steps.values()]
    if [round(min(times)), round(max(times))] != [3, 10]:
        raise ValueError(f"the title is not what the figures say: {times}")
    figure = Figure(figsize=(9, 6.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    _draw_steps(figure.subplots(), steps)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.suptitle(
        "optimizer.step() runs 3 to 10 times faster",
        x=0.012,
        ha="left",
        fontsize=17,
        weight="bold",
        color=INK,
    )
    return figure


def _draw_steps(axes: "Axes", steps: Bars) -> None:
    height, widest = 0.4, max(bars["stock"] for bars in steps.values())
    for place, bars in enumerate(steps.values()):
        for offset, side, color in ((-0.5, "stock", STOCK), (0.5, "plugin", OURS)):
            y = place + offset * height
            axes.barh(y, bars[side], height=height, color=color)
            said, weight = f"{bars[side]:.0f} ms", "normal"
            if side == "plugin":
                said += f", {bars['stock'] / bars['plugin']:.1f} times faster"
                weight = "bold"
            axes.text(
                bars[side] + 0.012 * widest,
                y,
                said,
                va="center",
                fontsize=12,
                weight=weight,
                color=INK,
            )
    axes.set_title(
        "Blockwise FP8 unless noted; the same FP8 weights on both sides",
        loc="left",
        fontsize=12,
        color=INK,
    )
    axes.set_yticks(range(len(steps)), [name.replace(", ", ",\n", 1) for name in steps])
    axes.tick_params(axis="y", length=0, labelsize=12, colors=INK)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.set_xlim(0, 1.1 * widest)
    axes.legend(
        handles=[axes.patches[0], axes.patches[1]],
        labels=["Megatron 0.19 with --fp8-param-gather", "with moe_optim"],
        loc="lower right",
        bbox_to_anchor=(1, 0.25),
        frameon=False,
        fontsize=12,
    )


def draw_convergence(figures: Mapping[str, Any]) -> "Figure":
    """Draw the losses of 300 steps with Adam."""
    title = "300 steps in blockwise FP8: moe_optim is closer to Megatron than another seed"
    return _draw_losses(figures["losses"], figures["distances"], title)


def draw_muon_convergence(figures: Mapping[str, Any]) -> "Figure":
    """Draw the losses of 300 steps with Muon, whose weights are bf16 in stock."""
    title = "300 steps of Muon in blockwise FP8: closer to Megatron than another seed"
    return _draw_losses(figures["muon_losses"], figures["muon_distances"], title)


def _draw_losses(
    rows: Sequence[Mapping[str, Any]], distances: Mapping[str, Any], title: str
) -> "Figure":
    """Draw the losses of both sides, and their difference beside that of two seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for row in rows:
        left.plot(row["stock"], color=STOCK, linewidth=4, label=f"Megatron, seed {row['seed']}")
        left.plot(row["plugin"], color=OURS, linewidth=1, label=f"moe_optim, seed {row['seed']}")
    left.set_title("Loss, nats per token", loc="left", fontsize=12, color=INK)
    for (name, values), color in zip(distances.items(), (OURS, "#6fb7a8", STOCK), strict=True):
        right.plot(values, color=color, linewidth=2, label=name)
    right.set_yscale("log")
    right.set_title(
        f"Distance from Megatron, means of {SMOOTHED} losses", loc="left", fontsize=12, color=INK
    )
    for axes in (left, right):
        axes.set_xlabel("iteration", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=10)
    figure.suptitle(
        title,
        x=0.012,
        ha="left",
        fontsize=13,
        weight="bold",
        color=INK,
    )
    return figure


def draw_formats(figures: Mapping[str, Any]) -> "Figure":
    """Draw held-out losses of all sides, averaged over common seeds, and final losses by seed."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.8), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = (*colormaps["tab10"].colors, *colormaps["Dark2"].colors)
    for number, (side, curves) in enumerate(figures["held_out"].items()):
        color = INK if number == 0 else colors[number - 1]
        iterations = [iteration for iteration, _ in curves[0]]
        losses = [[loss for _, loss in curve] for curve in curves]
        means = [sum(of_seeds) / len(of_seeds) for of_seeds in zip(*losses, strict=True)]
        left.plot(iterations, means, color=color, linewidth=1.8, label=side)
        last = figures["last"][side]
        right.plot(last, [side] * len(last), "o", color=color, markersize=8)
    left.set_ylim(0.95, 2.6)
    left.set_xlabel("iteration", color=INK)
    left.legend(frameon=False, fontsize=10)
    left.set_title(
        "Held-out loss, nats per byte, means of two seeds", loc="left", fontsize=12, color=INK
    )
    right.invert_yaxis()
    right.grid(axis="y", color="0.92")
    right.set_title("Mean of the last five, one point per seed", loc="left", fontsize=12, color=INK)
    for axes in (left, right):
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
