"""Plots of the documents, drawn from ``recipes/results``."""

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.documents.measured_tables import (
    CONVERGENCE,
    FUSED,
    GRAPHED,
    MUON_CONVERGENCE,
    SMOOTHED,
    STEPS,
    TENSORWISE_STEP,
    distances,
    gather_rows,
    last_held_out,
    read_result,
    runs_by_side,
    runs_of_common_seeds,
    step_reports,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "images"
STOCK, OURS, INK = "#b8c4ce", "#0f7f6c", "#26323b"
BYTES = "#c8a45c"
"""Color of bars that show a format, not a side."""
_KEY = "Drawn from"
"""Metadata key of a PNG for the hash of its data."""

Bars = dict[str, dict[str, float]]


ON_ONE = {
    "1 H200": FUSED,
    "the same, as a CUDA graph": GRAPHED[0],
    "1 H200, per-tensor scaling": TENSORWISE_STEP,
}


def step_figures() -> Bars:
    """Return machine -> stock and plug-in, in ms of ``optimizer.step()``; one GPU first."""
    reports = {label: read_result(file) for label, file in ON_ONE.items()}
    reports |= {STEPS[name]: report for name, report in step_reports().items()}
    return {
        label: {side: report[side]["optimizer_ms"] for side in ("stock", "plugin")}
        for label, report in reports.items()
    }


def byte_figures() -> Bars:
    """Return format -> gathered bytes per parameter."""
    rows = gather_rows()
    return {
        format: {"bytes": row["bytes_per_parameter"]}
        for (ranks, format, wire), row in rows.items()
        if ranks == 4 and wire == ("bf16" if format == "bf16" else "quantized")
    }


def draw_step_and_bytes(figures: Mapping[str, Bars]) -> "Figure":
    """Draw the time of a step beside stock in the same format, and the gathered bytes by format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, gathered = figures["steps"], figures["bytes"]
    times = [bars["stock"] / bars["plugin"] for bars in steps.values()]
    if [round(min(times)), round(max(times))] != [3, 10]:
        raise ValueError(f"the title is not what the figures say: {times}")
    figure = Figure(figsize=(11.5, 5.4), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_steps(left, steps)
    _draw_bytes(right, gathered)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.06)
    figure.suptitle(
        "A fused optimizer step takes a tenth to a third of the time of stock in the same format",
        x=0.012,
        ha="left",
        fontsize=13,
        weight="bold",
        color=INK,
    )
    return figure


def _draw_steps(axes: "Axes", steps: Bars) -> None:
    height, widest = 0.38, max(bars["stock"] for bars in steps.values())
    for place, bars in enumerate(steps.values()):
        for offset, side, color in ((-0.5, "stock", STOCK), (0.5, "plugin", OURS)):
            y = place + offset * height
            axes.barh(y, bars[side], height=height, color=color)
            weight = "bold" if side == "plugin" else "normal"
            axes.text(
                bars[side] + 0.012 * widest,
                y,
                f"{bars[side]:.0f} ms",
                va="center",
                fontsize=11,
                weight=weight,
                color=INK,
            )
    _label(axes, list(steps), "optimizer.step(), blockwise FP8 unless noted")
    axes.set_xlim(0, 1.14 * widest)
    axes.legend(
        handles=[axes.patches[0], axes.patches[1]],
        labels=["Megatron 0.19, --fp8-param-gather", "the same with moe_optim"],
        loc="upper left",
        bbox_to_anchor=(-0.01, 0.0),
        ncols=2,
        borderpad=0,
        handlelength=1.2,
        frameon=False,
        fontsize=11,
    )


def _draw_bytes(axes: "Axes", gathered: Bars) -> None:
    for place, bars in enumerate(gathered.values()):
        axes.barh(place, bars["bytes"], height=0.6, color=BYTES)
        axes.text(
            bars["bytes"] + 0.03,
            place,
            f"{bars['bytes']:.2f}",
            va="center",
            fontsize=11,
            weight="bold",
            color=INK,
        )
    said = {"bf16": "bf16, any optimizer", "mxfp8_2d": "mxfp8_2d, not in stock"}
    _label(axes, [said.get(name, name) for name in gathered], "Bytes gathered, per parameter")
    axes.set_xlim(0, 2.4)
    axes.text(
        -0.42,
        -0.05,
        "The format sets them. Stock in nvfp4 and fp8_block\ngathers the same; in mxfp8, 2.00. "
        "With expert\nparallelism and nothing overlapped, it gathers\neverything twice.",
        transform=axes.transAxes,
        va="top",
        fontsize=11,
        color=INK,
    )


def draw_convergence(figures: Mapping[str, Any]) -> "Figure":
    """Draw the losses of 300 steps with Adam."""
    title = "300 clipped steps in FP8 blocks: the plug-in is closer to stock than another seed"
    return _draw_losses(figures["losses"], figures["distances"], title)


def draw_muon_convergence(figures: Mapping[str, Any]) -> "Figure":
    """Draw the losses of 300 steps with Muon, whose weights are bf16 in stock."""
    title = "300 steps of Muon: the plug-in in FP8 blocks is closer to stock than another seed"
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
        left.plot(row["stock"], color=STOCK, linewidth=4, label=f"stock, seed {row['seed']}")
        left.plot(row["plugin"], color=OURS, linewidth=1, label=f"plug-in, seed {row['seed']}")
    left.set_title("Loss, nats per token", loc="left", fontsize=12, color=INK)
    for (name, values), color in zip(distances.items(), (OURS, "#6fb7a8", STOCK), strict=True):
        right.plot(values, color=color, linewidth=2, label=name)
    right.set_yscale("log")
    right.set_title(
        f"Distance from stock, means of {SMOOTHED} losses", loc="left", fontsize=12, color=INK
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


def _label(axes: "Axes", names: list[str], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_yticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.tick_params(axis="y", length=0, labelsize=11, colors=INK)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)


PICTURES: Mapping[str, Callable[[Mapping[str, Any]], "Figure"]] = {
    "convergence.png": draw_convergence,
    "convergence-muon.png": draw_muon_convergence,
    "formats.png": draw_formats,
    "step-and-bytes.png": draw_step_and_bytes,
}


def figures_of_pictures() -> dict[str, Any]:
    sides = runs_by_side()
    return {
        "steps": step_figures(),
        "bytes": byte_figures(),
        "losses": read_result(CONVERGENCE)["rows"],
        "distances": distances(),
        "muon_losses": read_result(MUON_CONVERGENCE)["rows"],
        "muon_distances": distances(MUON_CONVERGENCE),
        "held_out": {
            side: [row["held_out"] for row in runs] for side, runs in runs_of_common_seeds().items()
        },
        "last": {side: [last_held_out(row) for row in runs] for side, runs in sides.items()},
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
