"""Reads a run folder for a report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.checkpoint.files.untrusted_files import parse_json, read_file
from moe_optim.commands.train.events import Events, Point, read_events
from moe_optim.commands.train.run_folder import RunFolder, find_events, no_events
from moe_optim.commands.train.summary import loss_unit
from moe_optim.errors import ConfigError, LayoutError, quote
from moe_optim.formats.health_figures import TAGS, THRESHOLDS, warn_of

Look = tuple[int, npt.NDArray[Any]]  # iteration of a health sample, and one value per expert
_BY_EXPERT = "/by_expert"
_NUMBERS = (
    *("parameters", "quantized_parameters", "test_loss", "byte_entropy", "world_size"),
    *("iterations_per_second", "seconds", "resumed_from"),
)
_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("format", "optimizer", "command"), str),
    **dict.fromkeys(("rank0", "environment"), dict),
    **dict.fromkeys(_NUMBERS, (int, float)),
}
"""Key of ``model.json`` or ``summary.json`` -> type of its value, which may be null."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One value per expert, of one sample."""

    iteration: int
    layers: tuple[str, ...]
    values: npt.NDArray[np.float32]  # [layers, experts]; NaN where a layer has fewer experts


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a run; anything not recorded is empty."""

    name: str
    path: Path
    model: Mapping[str, Any]
    summary: Mapping[str, Any]  # summary.json; empty for an unfinished run
    events: Events

    def points(self, tag: str) -> tuple[Point, ...]:
        """Return a scalar over iterations; empty if it was not logged."""
        return self.events.scalars.get(tag, ())

    @property
    def format(self) -> str:
        """Format of the expert weights."""
        return str(self.model.get("format", "unknown format"))

    @property
    def loss_unit(self) -> str:
        """Unit of losses: nats per byte of the dataset of a run folder, else as in its summary."""
        return "nats/byte" if RunFolder(self.path).dataset.is_dir() else loss_unit(self.summary)

    @property
    def times(self) -> dict[str, float]:
        """Median milliseconds per iteration of Megatron's timers that were logged."""
        return {
            tag.removesuffix("-time"): 1e3 * median(point.value for point in points)
            for tag, points in self.events.scalars.items()
            if tag.endswith("-time")
        }

    def layers_with(self, figure: str) -> list[str]:
        """Return the linears, or layers, with a value per expert, in recorded order."""
        end = f"/{figure}{_BY_EXPERT}"
        tags = (tag for tag in self.events.tensors if tag.startswith(TAGS) and tag.endswith(end))
        return [tag.removeprefix(TAGS).removesuffix(end) for tag in tags]

    def looks(self, layer: str, figure: str, at: int | None = None) -> tuple[Look, ...]:
        """Return all samples of a health metric of one layer, up to iteration ``at``."""
        found = self.events.tensors.get(f"{TAGS}{layer}/{figure}{_BY_EXPERT}", ())
        return tuple(look for look in found if at is None or look[0] <= at)

    def sample(self, figure: str, at: int | None = None) -> Sample | None:
        """Return the last sample of a health metric up to iteration ``at``, or None."""
        layers = [one for one in self.layers_with(figure) if self.looks(one, figure, at)]
        if not layers:
            return None
        last = [self.looks(one, figure, at)[-1] for one in layers]
        table = np.full((len(last), max(len(values) for _, values in last)), np.nan, np.float32)
        for row, (_, values) in zip(table, last, strict=True):
            row[: len(values)] = values
        iteration = max(iteration for iteration, _ in last)
        return Sample(iteration=iteration, layers=tuple(layers), values=table)

    def health_warnings(self, at: int | None = None) -> list[str]:
        """Return a sentence for each health metric above its threshold, or NaN, in one sample.

        That is the last one up to iteration ``at``. Empty if the format is unknown, as for a run
        that left only events.
        """
        if self.format not in THRESHOLDS:
            return []
        lines: list[str] = []
        for layer in self.layers_with("amax"):
            names = ("norm", *THRESHOLDS[self.format])
            last = {
                name: looks[-1][1].tolist()
                for name in names
                if (looks := self.looks(layer, name, at))
            }
            if missing := [one for one in names if one not in last]:
                said = ", ".join(missing)
                lines.append(f"{layer}: {said} not recorded: the event file is cut off")
            else:
                lines += warn_of(layer, self.format, range(len(last["norm"])), last)
        return lines


def read_run(path: Path) -> Run:
    """Read the results of a run, which may be unfinished.

    ``path`` is a run folder, or a folder of Megatron's TensorBoard events. LayoutError without
    events with a training loss, or for JSON of another form.
    """
    folder = RunFolder(path)
    events = read_events(find_events(path), tensors=TAGS)
    if not events.train:
        raise no_events(path)
    model, summary = _read(folder.model), _read(folder.summary)
    return Run(name=path.resolve().name, path=path, model=model, summary=summary, events=events)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse_json(read_file(path.parent, path.name))
        if not isinstance(content, dict):
            raise ValueError
    except ValueError as error:
        raise LayoutError(
            f"{path}: expected names and values as JSON, got something else. Remove the file."
        ) from error
    for key, kind in _KINDS.items():
        value = content.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise LayoutError(
                f"{path}: {key}: expected a value of another type, got {quote(value)}. Correct it, "
                "or remove the file."
            )
    return content


def require_no_run(out: Path, *, own: Path | None = None) -> None:
    """Raise ConfigError where a page would overwrite a run or its report, or cannot be written.

    ``own`` is the run whose report the page is, or None.
    """
    require_writable(out, expected="a folder")
    out = out.resolve()
    is_report = RunFolder(out.parent).report == out and RunFolder(out.parent).is_taken
    if RunFolder(out).is_taken or (is_report and (own is None or own.resolve() != out.parent)):
        raise ConfigError(
            f"--out {out}: expected a folder for a page, got that of a run, whose files have the "
            "same names. Name another folder."
        )
