"""Answers whether quantization harmed a run: figures of all health samples beside thresholds."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from moe_optim.commands.report.reading import Run
from moe_optim.commands.train.events import Point
from moe_optim.formats.health_figures import THRESHOLDS

_BEFORE = 20  # losses that a loss is compared with, those right before it
_FEWEST = 5
_DEVIATIONS = 8.0  # median deviations above the median at which a loss spikes
_LEAST_RISE = 0.05  # part of the median that a spike rises at least


class Largest(NamedTuple):
    """Largest value of a health figure over all samples, layers and experts."""

    figure: str
    threshold: float
    value: float  # NaN if a sample is not finite
    layer: str
    expert: int
    iteration: int
    first_above: int | None  # first iteration with a value above the threshold

    @property
    def is_above(self) -> bool:
        """Whether the value is above its threshold, or not finite."""
        return self.first_above is not None

    def sentence(self) -> str:
        """Return the value beside its threshold, with its place."""
        return (
            f"{self.figure.replace('_', ' ')} {self.value:.3g}, threshold {self.threshold:g} "
            f"({self.layer}, expert {self.expert}, iteration {self.iteration})"
        )


def find_spikes(losses: Sequence[Point]) -> list[int]:
    """Return the iterations at which the training loss jumps, or is no number; one per jump."""
    spikes: list[int] = []
    before: list[float] = []
    is_up = False
    for point in losses:
        recent = before[-_BEFORE:]
        was_up, is_up = is_up, not math.isfinite(point.value) or _jumps(point.value, recent)
        if is_up and not was_up:
            spikes.append(point.iteration)
        if not is_up:
            before.append(point.value)
    return spikes


def _jumps(value: float, recent: Sequence[float]) -> bool:
    if len(recent) < _FEWEST:
        return False
    middle = median(recent)
    spread = median(abs(one - middle) for one in recent)
    return value - middle > max(_DEVIATIONS * spread, _LEAST_RISE * abs(middle))


def find_largest(run: Run, at: int | None = None) -> list[Largest]:
    """Return the largest value of every figure that has a threshold, nearest to it first.

    Of all samples, or of those up to iteration ``at``.
    """
    thresholds = THRESHOLDS.get(run.format, {})
    found = [one for name, limit in thresholds.items() for one in _largest(run, name, limit, at)]
    return sorted(found, key=lambda one: (not one.is_above, -one.value / one.threshold))


def _largest(run: Run, figure: str, threshold: float, at: int | None) -> Iterator[Largest]:
    best: tuple[float, str, int, int] | None = None
    first: int | None = None
    for layer in run.layers_with(figure):
        norms = dict(run.looks(layer, "norm"))
        for iteration, values in run.looks(layer, figure, at):
            is_zero = np.isnan(values) & (norms.get(iteration, 0) == 0)  # 0 / 0 is no fault
            values = np.where(is_zero, 0.0, values)
            if (~(values <= threshold)).any():
                first = iteration if first is None else min(first, iteration)
            expert = int(np.argmax(np.where(np.isnan(values), np.inf, values)))
            value = float(values[expert])
            if best is None or math.isnan(value) or value > best[0]:
                best = value, layer, expert, iteration
    if best is not None:
        value, layer, expert, iteration = best
        yield Largest(figure, threshold, value, layer, expert, iteration, first)


def judge(run: Run, largest: Sequence[Largest], spikes: Sequence[int]) -> str:
    """Return the answer to "was it quantization?" in a sentence or two."""
    jumped = f"The loss jumped at {_listed(spikes)}." if spikes else "The loss never jumped."
    if not largest and run.format not in THRESHOLDS:
        return f"Unknown: health is sampled of quantized experts, not of {run.format}. {jumped}"
    if not largest:
        return (
            f"Unknown: the health of quantized experts was not sampled. {jumped} To sample it, "
            "train or resume with --set moe_optim.health_interval=100 (scripts: --moe-optim-set "
            "health_interval=100)."
        )
    worst = largest[0].sentence()
    if not largest[0].is_above:
        return f"No sign of it: no figure exceeded its threshold. Closest: {worst}. {jumped}"
    first = min(one.first_above for one in largest if one.first_above is not None)
    exceeded = f"thresholds were exceeded from iteration {first} on"
    if not spikes:
        return f"No harm so far, but {exceeded}. Largest: {worst}. {jumped}"
    if any(first <= spike for spike in spikes):
        return f"Possibly: {exceeded}. Largest: {worst}. {jumped}"
    return f"Probably not: {exceeded}, after the loss jumped. Largest: {worst}. {jumped}"


def _listed(iterations: Sequence[int]) -> str:
    if len(iterations) == 1:
        return f"iteration {iterations[0]}"
    shown = [str(one) for one in iterations[:8]]
    more = f"{len(iterations) - 8} more" if len(iterations) > 8 else shown.pop()
    return f"iterations {', '.join(shown)} and {more}"
