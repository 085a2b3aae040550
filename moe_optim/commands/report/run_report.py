"""Writes the report of one run: losses, expert health, time and configuration."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from moe_optim.commands.report import plots
from moe_optim.commands.report.page import Picture, render, write_page
from moe_optim.commands.report.reading import Run, read_run, require_no_run
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.formats.health_figures import TAGS
from moe_optim.screen import results_console

HEAT_MAPS = {  # health metric -> label, and whether its color scale is logarithmic
    "amax": ("largest magnitude", True),
    "error": ("relative error of the quantized weight", False),
    "flushed": ("share flushed to zero", False),
    "saturated": ("share saturated", False),
}
_OF_LAYERS = ("amax", "error", "saturated", "flushed", "dead_blocks", "norm_ratio", "distance")
_MOST_LINES = 8


def report(path: Path, out: Path | None = None) -> int:
    """Write the report of a run folder, print its path, and return 0.

    Args:
        path: run folder.
        out: output folder; None for ``report`` in the run folder.
    """
    out = out or RunFolder(path).report
    require_no_run(out, own=path)
    html, pictures = build_page(read_run(path))
    results_console().print(str(write_page(out, html, pictures)))
    return 0


def build_page(run: Run) -> tuple[str, list[Picture]]:
    """Return the report of a run as HTML, and its plots."""
    layers = run.layers_with("amax")
    health, tokens = run.sample("amax"), run.sample("tokens")
    times = {name: ms for name, ms in run.times.items() if math.isfinite(ms) and ms > 0}
    trends = [
        *_trend(run, layers, "error", "relative error"),
        *_trend(run, layers, "distance", "distance of experts"),
    ]
    pictures: dict[str, list[Picture] | None] = {
        "loss": [
            Picture(
                name="loss",
                png=plots.plot_loss(run.curves, run.loss_unit),
                alt="Training and held-out loss over iterations",
            )
        ],
        "norm": _curves(run, "gradient-norm", "gradient norm", {"gradient norm": "grad-norm"}),
        "health": [*_heat_maps(run), *trends] if health else None,
        "tokens": list(_tokens(run)),
        "time": list(_times(times)),
    }
    html = render(
        "report.html",
        title=f"Run {run.name}",
        run=run,
        pictures=pictures,
        health_iteration=health and health.iteration,
        warnings=run.health_warnings(),
        figures=_OF_LAYERS,
        layers={
            layer: [run.points(f"{TAGS}{layer}/{figure}")[-1:] for figure in _OF_LAYERS]
            for layer in layers
        },
        tokens_iteration=tokens and tokens.iteration,
        times=len(times),
    )
    return html, [picture for some in pictures.values() for picture in some or ()]


def _curves(run: Run, name: str, label: str, tags: dict[str, str]) -> list[Picture]:
    """Return one plot of scalars, {legend: tag}; empty if the run logged none of them."""
    curves = {legend: points for legend, tag in tags.items() if (points := run.points(tag))}
    if not curves:
        return []
    png = plots.plot_curves(curves, label)
    return [Picture(name=name, png=png, alt=f"{label.capitalize()} over iterations")]


def _heat_maps(run: Run) -> Iterator[Picture]:
    """Draw the metrics of the last sample that are not all zero."""
    for figure, (label, logarithmic) in HEAT_MAPS.items():
        sample = run.sample(figure)
        if sample is not None and (sample.values > 0).any():
            png = plots.plot_heat_map(sample, label, logarithmic=logarithmic)
            alt = f"Heat map: {label} of each expert of each layer"
            yield Picture(name=figure, png=png, alt=alt)


def _trend(run: Run, layers: list[str], figure: str, label: str) -> list[Picture]:
    """Draw a metric over iterations, at most eight layers; empty before the second sample."""
    tags = {layer: f"{TAGS}{layer}/{figure}" for layer in layers}
    if not any(len(run.points(tag)) > 1 for tag in tags.values()):
        return []
    some = dict(list(tags.items())[:: -(-len(tags) // _MOST_LINES)])
    return _curves(run, f"{figure}-over-time", label, some)


def _tokens(run: Run) -> Iterator[Picture]:
    sample = run.sample("tokens")
    if sample is None:
        losses = {tag: tag for tag in run.events.scalars if tag.endswith("load_balancing_loss")}
        label = next(iter(losses)) if len(losses) == 1 else "load-balancing loss"
        yield from _curves(run, "balance", label, losses)
        return
    means = np.nanmean(sample.values, axis=1, keepdims=True)
    shares = replace(sample, values=sample.values / means)
    png = plots.plot_heat_map(shares, "tokens, divided by the mean of the layer")
    yield Picture(name="tokens", png=png, alt="Heat map: tokens of each expert of each layer")
    layers = run.layers_with("tokens")
    yield from _trend(run, layers, "imbalance", "busiest expert, divided by the mean")


def _times(times: dict[str, float]) -> Iterator[Picture]:
    if times:
        ordered = dict(sorted(times.items(), key=lambda item: -item[1]))
        png = plots.plot_bars(ordered, "median ms per iteration")
        yield Picture(name="time", png=png, alt="Median time of each part of an iteration")
