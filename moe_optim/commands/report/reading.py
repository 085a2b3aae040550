"""Reads a run folder for a report."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from moe_optim.checkpoint.files.bounded_json import parse_json
from moe_optim.checkpoint.files.regular_files import read_file
from moe_optim.commands.train.events import TRAIN_TAG, VALIDATION_TAG, Events, Point, read_events
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.commands.train.summary import Curves, loss_unit
from moe_optim.errors import ConfigError, LayoutError, MoEOptimError
from moe_optim.formats import FORMATS
from moe_optim.formats.health_figures import TAGS, THRESHOLDS, warn_of

if TYPE_CHECKING:
    import numpy as np
    import torch

_BY_EXPERT = "/by_expert"
_TIME = "-time"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One figure of every expert, at the last iteration whose health was sampled."""

    iteration: int
    layers: tuple[str, ...]
    values: "np.ndarray"
    """[layers, experts] fp32; NaN where a layer has fewer experts."""

    def of_mean(self) -> "Sample":
        """Return values divided by the mean of their layer."""
        import numpy as np

        return replace(self, values=self.values / np.nanmean(self.values, axis=1, keepdims=True))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a run; whatever it has not left is empty."""

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
        """Format of the expert weights."""
        return str(self.model.get("format", "unknown format"))

    @property
    def loss_unit(self) -> str:
        """Unit of losses: runs whose tokens are bytes have the bytes' entropy."""
        return loss_unit(self.summary)

    @property
    def times(self) -> dict[str, float]:
        """Median milliseconds per iteration of Megatron's timers that were logged."""
        return {
            tag.removesuffix(_TIME): 1e3 * median(point.value for point in points)
            for tag, points in self.events.scalars.items()
            if tag.endswith(_TIME)
        }

    @property
    def health_layers(self) -> list[str]:
        """Names of the linears whose health was sampled, in the order of the event files."""
        return self.layers_with("amax")

    def layers_with(self, figure: str) -> list[str]:
        """Return the linears, or layers, that have a figure of every expert, in that order."""
        end = f"/{figure}{_BY_EXPERT}"
        tags = (tag for tag in self.events.tensors if tag.startswith(TAGS) and tag.endswith(end))
        return [tag.removeprefix(TAGS).removesuffix(end) for tag in tags]

    def sample(self, figure: str) -> Sample | None:
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
        return Sample(iteration=iteration, layers=tuple(last), values=table)

    def health_warnings(self) -> list[str]:
        """Return a sentence for each figure above its threshold, or NaN, in the last sample.

        Empty if the format is not known, as of a run that left events alone.
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
        """Return {figure: last values [experts]} of one linear."""
        import torch

        start = f"{TAGS}{layer}/"
        return {
            tag.removeprefix(start).removesuffix(_BY_EXPERT): torch.from_numpy(points[-1][1])
            for tag, points in self.events.tensors.items()
            if tag.startswith(start)
        }


def read_run(path: Path) -> Run:
    """Read the results of a run, which may be unfinished.

    Args:
        path: a run folder of ``moe-optim train``, or a folder with TensorBoard events of Megatron.

    Raises:
        LayoutError: there are no events with a training loss, or a file has no names and values.
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
        model=_read(folder.model),
        summary=_read(folder.summary),
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
    return content


@contextmanager
def refusing_damage(run: Path) -> Iterator[None]:
    """Refuse a run whose ``model.json`` or ``summary.json`` holds values of other types.

    Raises:
        LayoutError: reading a value raised inside the ``with``.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, MoEOptimError):
            raise
        raise LayoutError(
            f"{run}: expected model.json and summary.json as `moe-optim train` writes them, got: "
            f"{error}. Remove the one that was changed."
        ) from error
