"""Pages, and plots of runs as PNGs, about five inches wide, legible on a phone."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.report.reading import Sample
from moe_optim.commands.train.events import Events, Point
from moe_optim.commands.train.summary import draw_curves, smoothed

_MOST_LABELS = 24
_LEGEND_COLUMNS = 3
_MOST_LETTERS = 36


def _new(height: float = 3.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.0, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain(text: str) -> str:
    return text.replace("$", r"\$")


class Picture(NamedTuple):
    """A PNG."""

    name: str  # file name without suffix
    png: bytes
    alt: str

    @classmethod
    def of(cls, figure: Figure, name: str, alt: str) -> "Picture":
        """Return a drawn figure."""
        png = io.BytesIO()
        figure.savefig(png, format="png")
        return cls(name, png.getvalue(), alt)

    @property
    def url(self) -> str:
        """Data URL of the PNG."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Iterations to mark in every plot over iterations."""

    spikes: tuple[int, ...] = ()  # jumps of the training loss
    at: int | None = None  # health sample that the page shows


NO_MARKS = Marks()


def _over_iterations(axes: Axes, label: str, marks: Marks) -> None:
    if marks.at is not None:
        axes.axvline(marks.at, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
    for spike in marks.spikes:
        axes.axvline(spike, color="tab:red", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlabel("iteration")
    axes.set_title(_plain(label), loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="0.92")


def plot_loss(curves: Events, unit: str, marks: Marks) -> Picture:
    """Draw training and held-out loss."""
    figure, axes = _new()
    draw_curves(axes, curves)
    _over_iterations(axes, f"loss ({unit})", marks)
    axes.legend(frameon=False)
    return Picture.of(figure, "loss", "Training and held-out loss over iterations")


def plot_curves(
    name: str,
    curves: Mapping[str, Sequence[Point]],
    label: str,
    *,
    alt: str,
    smooth: bool = False,
    marks: Marks = NO_MARKS,
    threshold: float | None = None,
) -> Picture:
    """Draw scalars over iterations, one line each, with a legend for several.

    ``label`` names the values and their unit; ``smooth`` draws moving averages. A ``threshold`` is
    a line, with an axis that begins at 0. ``alt`` is the beginning of a description.
    """
    rows = -(-len(curves) // _LEGEND_COLUMNS) if len(curves) > 1 else 0
    figure, axes = _new(3.0 + 0.18 * rows)
    lines = []
    for points in curves.values():
        ys = [point.value for point in points]
        lines += axes.plot(
            [point.iteration for point in points],
            smoothed(ys) if smooth else ys,
            linewidth=1.3,
            marker="o" if len(ys) < 12 else None,
            markersize=3,
        )
    values = [point.value for points in curves.values() for point in points]
    finite = [value for value in values if math.isfinite(value)]
    if threshold is not None:
        axes.axhline(threshold, color="0.3", linewidth=0.9)
        top = max([threshold, *finite])
        axes.set_ylim(0.0, 1.08 * top)
        axes.text(
            1.0,
            threshold,
            "threshold ",
            transform=axes.get_yaxis_transform(),
            fontsize=7,
            ha="right",
            va="bottom",
        )
    elif finite and min(finite) > 0 and max(finite) > 30 * min(finite):
        axes.set_yscale("log")
    _over_iterations(axes, label, marks)
    if rows:
        figure.legend(
            lines,
            [_named(name) for name in curves],
            loc="outside lower left",
            frameon=False,
            fontsize=8,
            ncols=_LEGEND_COLUMNS,
        )
    return Picture.of(figure, name, f"{alt} over iterations")


def plot_heat_map(
    name: str, sample: Sample, label: str, alt: str, threshold: float | None = None
) -> Picture:
    """Draw one value per expert: a row per linear, a column per expert.

    ``amax`` has a logarithmic scale, whose lowest color is that of zeros. A ``threshold`` is the
    end of a scale from 0, above which values are red.
    """
    rows, values = len(sample.layers), sample.values
    scale: Normalize | None = None if threshold is None else Normalize(0.0, threshold)
    step = -(-rows // _MOST_LABELS)
    figure, axes = _new(1.3 + 0.22 * min(rows, _MOST_LABELS))
    positive = values[np.isfinite(values) & (values > 0)]
    if name == "amax" and len(positive) and positive.max() > positive.min():
        scale = LogNorm(float(positive.min()), float(positive.max()))
        values = np.maximum(values, positive.min())
    colors = colormaps["viridis"].with_extremes(over="tab:red")
    image = axes.imshow(values, aspect="auto", norm=scale, cmap=colors, interpolation="nearest")
    axes.set_yticks(range(0, rows, step), list(map(_plain, sample.layers[::step])), fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("expert")
    axes.set_title(label, loc="left", fontsize=10)
    figure.colorbar(image, ax=axes, extend="neither" if threshold is None else "max")
    return Picture.of(figure, name, f"Heat map: {alt} of each expert of each layer")


def plot_bars(name: str, values: Mapping[str, float], label: str, alt: str) -> Picture:
    """Draw a bar for each value, the first at the top."""
    figure, axes = _new(0.9 + 0.28 * len(values))
    places = range(len(values))  # shortened names may coincide
    bars = axes.barh(places, list(values.values()), color="tab:blue", height=0.65)
    axes.set_yticks(places, [_named(name) for name in values])
    texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values.values()]
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(label, loc="left", fontsize=10)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.18)
    return Picture.of(figure, name, alt)


def _named(name: str) -> str:
    """Shorten a name at its front; paths differ at their ends."""
    return _plain(name if len(name) <= _MOST_LETTERS else f"…{name[1 - _MOST_LETTERS :]}")


def render(template: str, **context: Any) -> str:
    """Render a template; every value of ``context`` is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("moe_optim.commands.report"),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(context)


def write_page(folder: Path, html: str, pictures: Sequence[Picture]) -> Path:
    """Write ``index.html`` and every plot as a file beside it; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        write_atomically(folder / f"{picture.name}.png", picture.png)
    path = folder / "index.html"
    write_atomically(path, html.encode())
    return path
