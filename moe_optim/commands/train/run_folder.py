"""The folder of one training run.

::

    RUN/checkpoints/      Megatron's torch_dist checkpoints and its tracker file
    RUN/logs/             stdout.log and stderr.log of every rank and launch
    RUN/tensorboard/      event files of every launch
    RUN/arguments.json    options of the run, inherited by a resumed run
    RUN/dataset/          tokens of the text, unless Megatron's flags name other data
    RUN/index_cache/      Megatron's sample index of the dataset; rebuilt by every launch
    RUN/model.json        description of the model that rank 0 trained
    RUN/summary.json      written last, when the run has finished
    RUN/report/           written by `moe-optim report`: index.html and its plots
    RUN/.lock             held by the launcher during the run
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe_optim.checkpoint.files.folders import (
    TRACKER,
    iteration_folders,
    iteration_of,
    read_tracker,
)
from moe_optim.checkpoint.files.publishing import DISK_FULL, require_writable
from moe_optim.checkpoint.integrity import checkpoint_defect
from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.train.events import FILES, TRAIN_TAG
from moe_optim.errors import ConfigError, LayoutError, StateError


class RunFolder:
    """Paths of one run; creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints, self.logs = path, path / "checkpoints", path / "logs"
        self.tensorboard, self.index_cache = path / "tensorboard", path / "index_cache"
        self.dataset, self.report = path / "dataset", path / "report"
        self.arguments, self.model = path / "arguments.json", path / "model.json"
        self.summary = path / "summary.json"

    @property
    def is_taken(self) -> bool:
        """Whether the folder contains results of a run."""
        left = self.checkpoints, self.tensorboard, self.model, self.summary
        return any(path.exists() for path in left)


def find_events(path: Path) -> Path:
    """Return the folder with event files of a run, or ``path`` itself; LayoutError without any."""
    own = RunFolder(path).tensorboard
    found = own if own.is_dir() else path
    if not any(found.glob(FILES)):
        raise no_events(path)
    return found


def no_events(path: Path) -> LayoutError:
    """Return the error for a folder without events of training."""
    return LayoutError(
        f"{path}: expected a run folder, with TensorBoard events and the scalar {TRAIN_TAG!r} in "
        "them, got none. Name a folder that `moe-optim train` has written, or Megatron's "
        "--tensorboard-dir."
    )


@contextlib.contextmanager
def claim(path: Path, *, resume: bool) -> Iterator[RunFolder]:
    """Create a run folder, unless it is resumed, and hold its lock, which excludes other runs.

    Removes what it made after a ConfigError, with which a run is refused before it starts.
    StateError if the folder is held, or has results without ``resume``, or is missing with it.
    """
    folder = RunFolder(path)
    if resume and not path.is_dir():
        raise StateError(
            f"--resume: expected the folder of a run, got no folder {path}. Name that of the run "
            "with --out, or start a new one without --resume."
        )
    require_writable(path, expected="a folder")
    made = [each for each in (path, *path.parents) if not each.exists()]
    has_lock = (path / ".lock").exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder, resume=resume):
            yield folder
    except ConfigError:  # nothing has started
        if not has_lock:
            (path / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for each in made:
                each.rmdir()
        raise


@contextlib.contextmanager
def _locked(folder: RunFolder, *, resume: bool) -> Iterator[None]:
    path = folder.path
    with (path / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"{path}: another run is training in this folder. Wait for it, stop it, or give "
                "another folder with --out."
            ) from None
        held = [folder.summary] if folder.summary.exists() else []
        held += iteration_folders(folder.checkpoints)
        if held and not resume:
            raise StateError(
                f"{path}: already contains a run ({held[0].relative_to(path)}). Continue it with "
                "--resume, or start a new one in another folder with --out."
            )
        yield


class ResumePoint(NamedTuple):
    """Checkpoint to resume from, and notes of skipped ones and of a corrected tracker file."""

    iteration: int
    notes: tuple[str, ...]


def find_resume_point(checkpoints: Path) -> ResumePoint:
    """Find the newest complete checkpoint and write its iteration to Megatron's tracker file."""
    notes: list[str] = []
    for checkpoint in iteration_folders(checkpoints):
        defect = checkpoint_defect(checkpoint)
        if defect is None:
            iteration = iteration_of(checkpoint)
            return ResumePoint(iteration, (*notes, *_correct_tracker(checkpoints, iteration)))
        notes.append(f"skipped the incomplete checkpoint {checkpoint.name}: {defect}")
    raise StateError(
        f"--resume: {checkpoints} contains no complete checkpoint "
        f"({'; '.join(notes) or 'there are none'}). "
        "Start a new run without --resume in another folder with --out."
    )


def newest_complete_checkpoint(checkpoints: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint, or None; changes nothing."""
    complete = (one for one in iteration_folders(checkpoints) if checkpoint_defect(one) is None)
    return next(map(iteration_of, complete), None)


def _correct_tracker(checkpoints: Path, iteration: int) -> list[str]:
    try:
        found = read_tracker(checkpoints)
        if found == str(iteration):
            return []
        write_atomically(checkpoints / TRACKER, str(iteration).encode())
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise StateError(
            f"{checkpoints / TRACKER}: expected a file with an iteration, got: {error.strerror}. "
            "Remove it."
        ) from error
    was = "missing" if found is None else repr(found)[:40]
    return [f"set {TRACKER} to {iteration} (it was {was})"]
