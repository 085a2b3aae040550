"""Reads the event files of all launches of a run as one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

TRAIN_TAG, VALIDATION_TAG = "lm loss", "lm loss validation"
FILES = "events.out.tfevents.*"
"""Names of event files."""
_TEXT = "/text_summary"


class Point(NamedTuple):
    """One scalar event."""

    iteration: int
    value: float
    time: float


@dataclass(frozen=True, kw_only=True)
class Events:
    """Merged content of event files; every tag has one value per iteration, in order."""

    scalars: Mapping[str, tuple[Point, ...]]
    tensors: Mapping[str, tuple[tuple[int, "np.ndarray"], ...]]
    """Tag -> pairs of iteration and value."""
    texts: Mapping[str, str]
    """Tag -> last text, such as Megatron's arguments by name."""

    @property
    def train(self) -> tuple[Point, ...]:
        """Training losses."""
        return self.scalars.get(TRAIN_TAG, ())

    @property
    def validation(self) -> tuple[Point, ...]:
        """Held-out losses."""
        return self.scalars.get(VALIDATION_TAG, ())


def read_events(folder: Path, *, tensors: str | None = None) -> Events:
    """Read the event files of all launches; each replaces earlier ones from its first iteration on.

    ``tensors`` is a prefix of tags; None reads neither tensors nor texts.
    """
    launches = [_read(path, tensors) for path in folder.glob(FILES)]
    launches.sort(
        key=lambda one: min((p.time for ps in one.scalars.values() for p in ps), default=0.0)
    )
    scalars: dict[str, tuple[Point, ...]] = {}
    found: dict[str, tuple[tuple[int, np.ndarray], ...]] = {}
    texts: dict[str, str] = {}
    for launch in launches:
        trained = [point.iteration for point in launch.train]
        evaluated = [point.iteration for point in launch.validation]
        begin = min(trained, default=None)
        for tag in dict.fromkeys([*scalars, *launch.scalars]):
            since = min(trained + evaluated, default=None) if tag == VALIDATION_TAG else begin
            earlier = (p for p in scalars.get(tag, ()) if since is None or p.iteration < since)
            scalars[tag] = (*earlier, *launch.scalars.get(tag, ()))
        for tag in dict.fromkeys([*found, *launch.tensors]):
            before = (one for one in found.get(tag, ()) if begin is None or one[0] < begin)
            found[tag] = (*before, *launch.tensors.get(tag, ()))
        texts |= launch.texts
    return Events(scalars=scalars, tensors=found, texts=texts)


def _read(path: Path, tensors: str | None) -> Events:
    """Return the events of one launch.

    Megatron logs the test loss under the validation tag too, after the validation losses of the
    same iteration: only the first value of an iteration is kept.
    """
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )
    from tensorboard.util.tensor_util import make_ndarray  # type: ignore[import-untyped]

    sizes = {"scalars": 0} | ({} if tensors is None else {"tensors": 0})  # 0 keeps all
    events = EventAccumulator(str(path), size_guidance=sizes).Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        points: dict[int, Point] = {}
        for event in events.Scalars(tag):
            point = Point(iteration=event.step, value=event.value, time=event.wall_time)
            points.setdefault(event.step, point)
        scalars[tag] = tuple(points[iteration] for iteration in sorted(points))
    found, texts = {}, {}
    for tag in events.Tags()["tensors"] if tensors is not None else ():
        values = [(event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        if tag.endswith(_TEXT):
            texts[tag.removesuffix(_TEXT)] = values[-1][1].reshape(-1)[0].decode()
        elif tag.startswith(tensors or ""):
            found[tag] = tuple(sorted(values, key=lambda value: value[0]))
    return Events(scalars=scalars, tensors=found, texts=texts)
