"""Writes the report of one run: losses, expert health, time and configuration."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moe_optim.commands.report import plots
from moe_optim.commands.report.plots import Marks, Picture, render, write_page
from moe_optim.commands.report.reading import Run, read_run, require_no_run
from moe_optim.commands.report.verdict import find_largest, find_spikes, judge
from moe_optim.commands.train.events import Point
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.errors import ConfigError
from moe_optim.formats.health_figures import TAGS, THRESHOLDS
from moe_optim.screen import results_console

HEAT_MAPS = {  # health metric -> label
    "amax": "largest magnitude",
    "error": "relative error of the quantized weight",
    "flushed": "share flushed to zero",
    "saturated": "share saturated",
    "dead_blocks": "share of dead blocks",
}
_OF_LAYERS = ("amax", "error", "saturated", "flushed", "dead_blocks", "norm_ratio", "distance")
_MOST_LINES = 8


def report(path: Path, out: Path | None = None, at: int | None = None) -> int:
    """Write the report of a run folder, print the verdict and its path, and return 0.

    ``out`` is ``report`` in the run folder by default. The run is judged up to iteration ``at``,
    whose last health sample is shown; None for all of it.
    """
    out = out or RunFolder(path).report
    require_no_run(out, own=path)
    run = read_run(path)
    if at is not None and run.sample("amax", at) is None:
        layers = run.layers_with("amax")
        first = f"the first one at {run.looks(layers[0], 'amax')[0][0]}" if layers else "none"
        raise ConfigError(
            f"--at {at}: expected an iteration from the first health sample on, got a run with "
            f"{first}. Give another iteration, or none for the last sample."
        )
    if at is not None and at > (last := run.events.train[-1].iteration):
        raise ConfigError(f"--at {at}: expected at most {last}, the last iteration. Give that.")
    page = build_page(run, at)
    console = results_console()
    console.print(f"Was it quantization? {page.verdict}", soft_wrap=False)
    console.print(str(write_page(out, page.html, page.pictures)))
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A report of one run."""

    html: str
    pictures: list[Picture]
    verdict: str


def build_page(run: Run, at: int | None = None) -> Page:
    """Return the report of a run, with the last health sample up to iteration ``at``."""
    layers = run.layers_with("amax")
    health, tokens = run.sample("amax", at), run.sample("tokens", at)
    train = [point for point in run.events.train if at is None or point.iteration <= at]
    largest, spikes = find_largest(run, at), find_spikes(train)
    verdict = judge(run, largest, spikes)
    if at is not None:
        verdict = f"Up to iteration {at}, {verdict[0].lower()}{verdict[1:]}"
    marks = Marks(spikes=tuple(spikes), at=health.iteration if health and at is not None else None)
    times = {name: ms for name, ms in run.times.items() if math.isfinite(ms) and ms > 0}
    trends = [*_looks(run, marks), *_trend(run, layers, "distance", "distance of experts", marks)]
    pictures: dict[str, list[Picture] | None] = {
        "loss": [plots.plot_loss(run.events, run.loss_unit, marks)],
        "norm": _curves(
            run, "gradient-norm", "gradient norm", {"gradient norm": "grad-norm"}, marks
        ),
        "health": [*trends, *_heat_maps(run, at)] if health else None,
        "tokens": list(_tokens(run, at, marks)),
        "time": list(_times(times)),
    }
    html = render(
        "report.html",
        title=f"Run {run.name}",
        run=run,
        pictures=pictures,
        verdict=verdict,
        largest=largest,
        spikes=spikes,
        is_last=at is None,
        health_iteration=health and health.iteration,
        warnings=run.health_warnings(at),
        figures=_OF_LAYERS,
        layers={
            layer: [_last(run.points(f"{TAGS}{layer}/{figure}"), at) for figure in _OF_LAYERS]
            for layer in layers
        },
        tokens_iteration=tokens and tokens.iteration,
        times=len(times),
    )
    shown = [picture for some in pictures.values() for picture in some or ()]
    return Page(html=html, pictures=shown, verdict=verdict)


def _last(points: Sequence[Point], at: int | None) -> list[Point]:
    return [point for point in points if at is None or point.iteration <= at][-1:]


def _curves(run: Run, name: str, label: str, tags: dict[str, str], marks: Marks) -> list[Picture]:
    """Return one plot of scalars, {legend: tag}; empty if the run logged none of them."""
    curves = {legend: points for legend, tag in tags.items() if (points := run.points(tag))}
    if not curves:
        return []
    return [plots.plot_curves(name, curves, label, alt=label.capitalize(), marks=marks)]


def _looks(run: Run, marks: Marks) -> Iterator[Picture]:
    """Draw every sample of a metric beside its threshold: the worst expert of each layer.

    At most eight layers, those with the largest values; no metric that is always zero.
    """
    for figure, threshold in THRESHOLDS.get(run.format, {}).items():
        worst = {
            layer: [
                Point(iteration=iteration, value=float(np.nanmax(values)), time=0.0)
                for iteration, values in run.looks(layer, figure)
                if not np.isnan(values).all()
            ]
            for layer in run.layers_with(figure)
        }
        most = {
            layer: max((p.value for p in points), default=0.0) for layer, points in worst.items()
        }
        if not any(most.values()):
            continue
        shown = sorted(most, key=lambda layer: -most[layer])[:_MOST_LINES]
        label = HEAT_MAPS[figure]
        yield plots.plot_curves(
            f"{figure}-over-time",
            {layer: points for layer, points in worst.items() if layer in shown},
            f"{label}, worst expert",
            alt=f"{label.capitalize()} of the worst expert of each layer",
            marks=marks,
            threshold=threshold,
        )


def _heat_maps(run: Run, at: int | None) -> Iterator[Picture]:
    """Draw the metrics of one sample that are not all zero, on a scale up to their threshold."""
    thresholds = THRESHOLDS.get(run.format, {})
    for figure, label in HEAT_MAPS.items():
        sample = run.sample(figure, at)
        if sample is not None and (sample.values > 0).any():
            yield plots.plot_heat_map(figure, sample, label, label, thresholds.get(figure))


def _trend(run: Run, layers: list[str], figure: str, label: str, marks: Marks) -> list[Picture]:
    """Draw a metric over iterations, at most eight layers; empty before the second sample."""
    tags = {layer: f"{TAGS}{layer}/{figure}" for layer in layers}
    if not any(len(run.points(tag)) > 1 for tag in tags.values()):
        return []
    some = dict(list(tags.items())[:: -(-len(tags) // _MOST_LINES)])
    return _curves(run, f"{figure}-over-time", label, some, marks)


def _tokens(run: Run, at: int | None, marks: Marks) -> Iterator[Picture]:
    sample = run.sample("tokens", at)
    if sample is None:
        losses = {tag: tag for tag in run.events.scalars if tag.endswith("load_balancing_loss")}
        label = next(iter(losses)) if len(losses) == 1 else "load-balancing loss"
        yield from _curves(run, "balance", label, losses, marks)
        return
    means = np.nanmean(sample.values, axis=1, keepdims=True)
    shares = replace(sample, values=sample.values / means)
    label = "tokens, divided by the mean of the layer"
    yield plots.plot_heat_map("tokens", shares, label, "tokens")
    layers = run.layers_with("tokens")
    yield from _trend(run, layers, "imbalance", "busiest expert, divided by the mean", marks)


def _times(times: dict[str, float]) -> Iterator[Picture]:
    if times:
        ordered = dict(sorted(times.items(), key=lambda item: -item[1]))
        alt = "Median time of each part of an iteration"
        yield plots.plot_bars("time", ordered, "median ms per iteration", alt)
