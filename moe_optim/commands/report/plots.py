"""Draws pictures of runs, legible at the width of a phone: about five inches wide."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_optim.commands.console.pictures import plain, png_of
from moe_optim.commands.report.reading import Sample
from moe_optim.commands.train.events import Point
from moe_optim.commands.train.summary import Curves, draw_curves, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, DPI = 5.0, 200  # inches, pixels an inch
_MOST_LABELS = 24
_MOST_LETTERS = 36


def _axes(height: float = 3.0) -> "Axes":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _png(axes: "Axes") -> bytes:
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    return png_of(figure)


def _over_iterations(axes: "Axes", label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="iteration", ylabel=plain(label))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="0.92")


def plot_loss(curves: Curves, unit: str) -> bytes:
    """Draw training and held-out loss; return a PNG, as everything here does."""
    axes = _axes()
    draw_curves(axes, curves)
    _over_iterations(axes, f"loss ({unit})")
    axes.legend(frameon=False)
    return _png(axes)


def plot_curves(
    curves: Mapping[str, Sequence[Point]], label: str, *, smooth: bool = False
) -> bytes:
    """Draw scalars over iterations, one line each, named where there are several.

    Args:
        curves: points by name; any of them may be empty.
        label: name of the values, with their unit.
        smooth: whether to draw means of neighbours.
    """
    axes = _axes()
    values = [point.value for points in curves.values() for point in points]
    for name, points in curves.items():
        ys = [point.value for point in points]
        axes.plot(
            [point.iteration for point in points],
            smoothed(ys) if smooth else ys,
            linewidth=1.3,
            marker="o" if len(ys) < 12 else None,
            markersize=3,
            label=_named(name),
        )
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > 30 * min(finite):
        axes.set_yscale("log")
    _over_iterations(axes, label)
    if len(curves) > 1:
        axes.legend(
            axes.lines,
            [_named(name) for name in curves],  # also those that begin with an underscore
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),  # above the axes
            borderaxespad=0.0,
            frameon=False,
            fontsize=8,
            ncols=3,
        )
    return _png(axes)


def plot_heat_map(sample: Sample, label: str, *, logarithmic: bool = False) -> bytes:
    """Draw a figure of every expert: a row a linear, a column an expert.

    Args:
        sample: figures to draw.
        label: name of the values.
        logarithmic: whether colours go by magnitude; zeros have the lowest.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    rows = len(sample.layers)
    axes = _axes(min(12.0, 1.3 + 0.22 * rows))
    positive = sample.values[np.isfinite(sample.values) & (sample.values > 0)]
    scale: Any = None
    values = sample.values
    if logarithmic and len(positive) and positive.max() > positive.min():
        scale = LogNorm(float(positive.min()), float(positive.max()))
        values = np.maximum(values, positive.min())
    image = axes.imshow(values, aspect="auto", norm=scale, interpolation="nearest")
    step = -(-rows // _MOST_LABELS)
    axes.set_yticks(range(0, rows, step), list(map(plain, sample.layers[::step])), fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("expert")
    axes.set_title(label, loc="left", fontsize=10)
    axes.figure.colorbar(image, ax=axes)
    return _png(axes)


def plot_bars(values: Mapping[str, float], label: str) -> bytes:
    """Draw a bar for each value, the first at the top."""
    axes = _axes(0.9 + 0.28 * len(values))
    places = range(len(values))  # shortened names may be alike
    bars = axes.barh(places, list(values.values()), color="tab:blue", height=0.65)
    axes.set_yticks(places, [_named(name) for name in values])
    axes.bar_label(bars, fmt=_spell, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(label)
    axes.margins(x=0.18)
    return _png(axes)


def _named(name: str) -> str:
    """Shorten a name to draw from its front; the ends of paths tell them apart."""
    return plain(name if len(name) <= _MOST_LETTERS else f"…{name[1 - _MOST_LETTERS :]}")


def _spell(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
