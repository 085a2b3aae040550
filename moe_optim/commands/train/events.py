"""The event files of a run, those of all its launches as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

TRAIN_TAG, VALIDATION_TAG = "lm loss", "lm loss validation"
_TEXT = "/text_summary"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One scalar as an event file has it."""

    iteration: int
    value: float
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """What event files hold; every tag has one value an iteration, by iteration."""

    scalars: Mapping[str, tuple[Point, ...]]
    tensors: Mapping[str, tuple[tuple[int, "np.ndarray"], ...]]
    """Iteration and value."""
    texts: Mapping[str, str]
    """The last of each, such as Megatron's arguments by name."""


def read_events(folder: Path, *, tensors: str | None = None) -> Events:
    """Read the event files of all launches; where two launches overlap, the later one counts.

    A launch that starts at iteration n takes back everything at and after n from those before it,
    be it that it was resumed there or began again.

    Args:
        folder: of the files.
        tensors: how the tags of tensors begin that are read; None reads neither these nor texts.
    """
    launches = [_read(path, tensors) for path in folder.glob("events.out.tfevents.*")]
    launches.sort(key=lambda launch: min(map(_first_time, launch.scalars.values()), default=0.0))
    scalars: dict[str, tuple[Point, ...]] = {}
    found: dict[str, tuple[tuple[int, np.ndarray], ...]] = {}
    texts: dict[str, str] = {}
    for launch in launches:
        trained = [point.iteration for point in launch.scalars.get(TRAIN_TAG, ())]
        evaluated = [point.iteration for point in launch.scalars.get(VALIDATION_TAG, ())]
        begin = min(trained, default=None)
        for tag in dict.fromkeys([*scalars, *launch.scalars]):
            more = launch.scalars.get(tag, ())
            since = min(trained + evaluated, default=None) if tag == VALIDATION_TAG else begin
            before = scalars.get(tag, ())
            kept = tuple(p for p in before if since is None or p.iteration < since)
            scalars[tag] = kept + more
        for tag in dict.fromkeys([*found, *launch.tensors]):
            earlier = (one for one in found.get(tag, ()) if begin is None or one[0] < begin)
            found[tag] = (*earlier, *launch.tensors.get(tag, ()))
        texts |= launch.texts
    return Events(scalars=scalars, tensors=found, texts=texts)


def _first_time(points: Sequence[Point]) -> float:
    return min(point.time for point in points)


def _read(path: Path, tensors: str | None) -> Events:
    """Return what one launch has written.

    Megatron writes its loss on the test text under the validation tag too, and after the
    validation losses of the same iteration: the first one of an iteration is the one to keep.
    """
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    every = 0  # as a limit, it keeps all
    sizes = {"scalars": every} | ({} if tensors is None else {"tensors": every})
    events = EventAccumulator(str(path), size_guidance=sizes).Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        points: dict[int, Point] = {}
        for event in events.Scalars(tag):
            point = Point(iteration=event.step, value=event.value, time=event.wall_time)
            points.setdefault(event.step, point)
        scalars[tag] = tuple(sorted(points.values(), key=lambda point: point.iteration))
    found, texts = {}, {}
    for tag in events.Tags()["tensors"] if tensors is not None else ():
        values = [(event.step, _array(event.tensor_proto)) for event in events.Tensors(tag)]
        if tag.endswith(_TEXT):
            texts[tag.removesuffix(_TEXT)] = values[-1][1].reshape(-1)[0].decode()
        elif tensors is not None and tag.startswith(tensors):
            found[tag] = tuple(sorted(values, key=lambda value: value[0]))
    return Events(scalars=scalars, tensors=found, texts=texts)


def _array(proto: Any) -> "np.ndarray":
    from tensorboard.util.tensor_util import make_ndarray  # type: ignore[import-untyped]

    array: np.ndarray = make_ndarray(proto)
    return array
