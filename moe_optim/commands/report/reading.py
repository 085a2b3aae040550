"""A run folder as a report needs it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from moe_optim.checkpoint.files.untrusted_files import parse_json, read_file
from moe_optim.commands.report import records
from moe_optim.commands.train.events import TRAIN_TAG, VALIDATION_TAG, Events, Point, read_events
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.commands.train.summary import Curves, loss_unit
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import FORMATS
from moe_optim.formats.health_figures import TAGS, THRESHOLDS, warn_of

if TYPE_CHECKING:
    import numpy as np
    import torch

_BY_EXPERT = "/by_expert"
_TIME = "-time"


@dataclass(frozen=True, kw_only=True)
class Look:
    """One figure of every expert, at the last iteration that health was looked at."""

    iteration: int
    layers: tuple[str, ...]
    values: "np.ndarray"
    """[layers, experts] fp32; NaN where a layer has fewer experts."""

    def of_mean(self) -> "Look":
        """Return values divided by the mean of their layer."""
        import numpy as np

        return replace(self, values=self.values / np.nanmean(self.values, axis=1, keepdims=True))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run has left behind; what it has not is empty."""

    name: str
    path: Path
    model: Mapping[str, Any]
    """``model.json``."""
    summary: Mapping[str, Any]
    """``summary.json``, which unfinished runs lack."""
    events: Events

    def points(self, tag: str) -> tuple[Point, ...]:
        """Return a scalar over iterations; empty where it was not logged."""
        return self.events.scalars.get(tag, ())

    @property
    def curves(self) -> Curves:
        """The losses."""
        return Curves(train=self.points(TRAIN_TAG), validation=self.points(VALIDATION_TAG))

    @property
    def format(self) -> str:
        """Of the expert weights."""
        return str(self.model.get("format", "unknown format"))

    @property
    def loss_unit(self) -> str:
        """What losses are counted in: runs whose tokens are bytes have the bytes' entropy."""
        return loss_unit(self.summary)

    @property
    def times(self) -> dict[str, float]:
        """Timer of Megatron -> median milliseconds an iteration, as far as they were logged."""
        return {
            tag.removesuffix(_TIME): 1e3 * median(point.value for point in points)
            for tag, points in self.events.scalars.items()
            if tag.endswith(_TIME)
        }

    @property
    def health_layers(self) -> list[str]:
        """The linears whose health was looked at, in the order in which they were written."""
        return self.layers_with("amax")

    def layers_with(self, figure: str) -> list[str]:
        """Return the linears, or layers, of whose experts a figure was written, in that order."""
        end = f"/{figure}{_BY_EXPERT}"
        tags = (tag for tag in self.events.tensors if tag.startswith(TAGS) and tag.endswith(end))
        return [tag.removeprefix(TAGS).removesuffix(end) for tag in tags]

    def look(self, figure: str) -> Look | None:
        """Return the last values of a figure of health, or None."""
        import numpy as np

        last = {
            layer: self.events.tensors[f"{TAGS}{layer}/{figure}{_BY_EXPERT}"][-1]
            for layer in self.layers_with(figure)
        }
        if not last:
            return None
        experts = max(len(values) for _, values in last.values())
        table = np.full((len(last), experts), np.nan, dtype=np.float32)
        for row, (_, values) in zip(table, last.values(), strict=True):
            row[: len(values)] = values
        iteration = max(iteration for iteration, _ in last.values())
        return Look(iteration=iteration, layers=tuple(last), values=table)

    def health_warnings(self) -> list[str]:
        """Return a sentence for each figure above its threshold, or NaN, at the last look.

        None where the format is not known, as of a run that left events alone.
        """
        if self.format not in FORMATS:
            return []
        element = FORMATS[self.format].element
        lines: list[str] = []
        for layer in self.health_layers:
            figures = self._last_figures(layer)
            if missing := [one for one in ("norm", *THRESHOLDS[element]) if one not in figures]:
                said = ", ".join(missing)
                lines.append(f"{layer}: {said} not recorded: the event file is cut off")
            else:
                lines += warn_of(layer, element, range(len(figures["norm"])), figures)
        return lines

    def _last_figures(self, layer: str) -> dict[str, "torch.Tensor"]:
        """Return figure -> its last values [experts], of one linear."""
        import torch

        start = f"{TAGS}{layer}/"
        return {
            tag.removeprefix(start).removesuffix(_BY_EXPERT): torch.from_numpy(points[-1][1])
            for tag, points in self.events.tensors.items()
            if tag.startswith(start)
        }


def read_run(path: Path) -> Run:
    """Read what a run has left in its folder; it may be unfinished.

    Args:
        path: a run folder of ``moe-optim train``, or a folder with TensorBoard events of Megatron.

    Raises:
        LayoutError: there are no events with a training loss, or a file has no names and values, or
            values of other kinds.
    """
    folder = RunFolder(path)
    of_events = folder.tensorboard if folder.tensorboard.is_dir() else path
    events = read_events(of_events, tensors=TAGS)
    if not events.scalars.get(TRAIN_TAG):
        raise LayoutError(
            f"{path}: expected a run folder, with TensorBoard events and the scalar {TRAIN_TAG!r} "
            "in them, got none. Name a folder that `moe-optim train` has written, or Megatron's "
            "--tensorboard-dir."
        )
    return Run(
        name=path.resolve().name,
        path=path,
        model=_read(folder.model, records.MODEL),
        summary=_read(folder.summary, records.SUMMARY),
        events=events,
    )


def require_no_run(out: Path, *, own: Path | None = None) -> None:
    """Refuse to write a page where a run lies, or its report, whose files have the same names.

    Args:
        out: folder of the page.
        own: the run whose report it is, if it is one.

    Raises:
        ConfigError: it is the folder of a run, or of the report of another one.
    """
    out = out.resolve()
    of_report = RunFolder(out.parent)
    is_report = of_report.report == out and of_report.is_taken
    is_own = own is not None and own.resolve() == out.parent
    if RunFolder(out).is_taken or (is_report and not is_own):
        raise ConfigError(
            f"--out {out}: expected a folder for a page, got that of a run, whose files have the "
            "same names. Name another folder."
        )


def _read(path: Path, kinds: records.Kinds) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse_json(read_file(path.parent, path.name))
        if not isinstance(content, dict):
            raise ValueError("something else than names and values")
    except ValueError as error:
        raise LayoutError(
            f"{path}: expected names and values as JSON, got something else. Remove the file."
        ) from error
    if fault := records.find_fault(content, kinds):
        raise LayoutError(f"{path}: {fault}. Remove the file.")
    return content
