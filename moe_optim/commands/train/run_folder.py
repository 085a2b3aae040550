"""The folder of one training run: who may write in it, and what in it can be resumed.

::

    RUN/checkpoints/      Megatron's torch_dist checkpoints and its tracker file
    RUN/logs/launch1/     one log a rank and launch: rank0.log, rank1.log, ...
    RUN/tensorboard/      event files of every launch
    RUN/text.json         the paths of ``--text`` it began with, none for the standard library,
                          null for Megatron's data; a resume goes on with it
    RUN/arguments.json    what it was started with; a resume takes over what it is not given anew
    RUN/index_cache/      Megatron's sample index of the dataset; rebuilt by every launch
    RUN/model.json        what rank 0 says about the model it trained
    RUN/summary.json      written last: a run that has it has finished
    RUN/loss.png
    RUN/report/           written by `moe-optim report`: index.html and its pictures
    RUN/.lock             held by the launcher for as long as the run lives
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from moe_optim.checkpoint.files.folders import iteration_folders
from moe_optim.commands.console.files import full_disk_explained, write_atomically
from moe_optim.errors import ConfigError, StateError
from moe_optim.integration.argv import DATA_FLAGS


class RunFolder:
    """Where everything of one run lies, see above; nothing is created."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.index_cache = path / "index_cache"
        self.text = path / "text.json"
        self.arguments = path / "arguments.json"
        self.model = path / "model.json"
        self.summary = path / "summary.json"
        self.loss_plot = path / "loss.png"
        self.report = path / "report"
        self.lock = path / ".lock"

    @property
    def is_taken(self) -> bool:
        """Whether a run has left something here."""
        left = self.checkpoints, self.tensorboard, self.model, self.summary
        return any(path.exists() for path in left)

    def next_log_folder(self) -> Path:
        """Return the log folder of the coming launch; those of earlier launches are kept."""
        taken = [int(path.name.removeprefix("launch")) for path in self.logs.glob("launch[0-9]*")]
        return self.logs / f"launch{max(taken, default=0) + 1}"


def remember_text(folder: RunFolder, paths: Sequence[Path] | None) -> None:
    """Record what the run trains on, as ``--text`` names it; None: as Megatron's flags do."""
    record = None if paths is None else [str(path.absolute()) for path in paths]
    write_atomically(folder.text, f"{json.dumps(record)}\n".encode())


def recall_text(folder: RunFolder, given: Sequence[Path]) -> list[Path]:
    """Return what a resumed run goes on to train on: what it began with, if that was recorded.

    Raises:
        ConfigError: ``--text`` gives other text than the run began with, or it began with
            Megatron's data.
        StateError: the record is damaged.
    """
    if not folder.text.is_file():
        return list(given)
    began = _read_text_record(folder)
    if began is None:
        raise ConfigError(
            f"--resume: expected Megatron's flags after --, such as {' or '.join(DATA_FLAGS[:2])}, "
            f"by which {folder.path} began to train on data of its own, got none. Give them again, "
            "or start a new run in another folder with --out."
        )
    if given and {path.resolve() for path in given} != {path.resolve() for path in began}:
        raise ConfigError(
            f"--text: expected {spell_text(began)}, which {folder.path} began to train on, got "
            f"{spell_text(given)}. Leave --text out, or start a new run in another folder with "
            "--out."
        )
    return began


def require_megatron_data(folder: RunFolder, flag: str) -> None:
    """Refuse Megatron's flag for data where the run began with text.

    Raises:
        ConfigError: it did.
        StateError: the record is damaged.
    """
    began = _read_text_record(folder) if folder.text.is_file() else None
    if began is not None:
        raise ConfigError(
            f"{flag}: expected none, since {folder.path} began to train on {spell_text(began)}. "
            "Leave the flag out, or start a new run in another folder with --out."
        )


def _read_text_record(folder: RunFolder) -> list[Path] | None:
    try:
        record = json.loads(folder.text.read_text())
        return None if record is None else [Path(path) for path in record]
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{folder.text}: expected a list of paths, got something else. Remove the file, and "
            "name what to train on as the run was started with it."
        ) from error


def spell_text(paths: Sequence[Path]) -> str:
    """Name the text to train on."""
    return " ".join(map(str, paths)) or "the standard library"


@contextlib.contextmanager
def claim(path: Path, *, resume: bool) -> Iterator[RunFolder]:
    """Create ``path`` and hold its lock inside the ``with``; no second run gets in meanwhile.

    A run that was refused before it wrote anything leaves no folder and no lock behind.

    Raises:
        StateError: another run holds the folder, or it holds the results of an earlier run and
            ``resume`` is not set.
        ConfigError: ``path`` cannot be a folder.
    """
    folder = RunFolder(path)
    missing = [one for one in (path, *path.parents) if not one.exists()]
    with full_disk_explained(path, "creating the run folder"):
        _create(path)
        lock = folder.lock.open("a+")
    with lock:
        _take(lock, path)
        try:
            if not resume:
                _refuse_earlier_run(folder)
            yield folder
        except BaseException:
            if not (folder.is_taken or folder.logs.exists() or folder.text.exists()):
                _remove(folder, missing)
            raise


def _remove(folder: RunFolder, created: Sequence[Path]) -> None:
    """Remove the lock and the folders that were created for it, the innermost first."""
    folder.lock.unlink()
    with contextlib.suppress(OSError):  # others have put something there
        for one in created:
            one.rmdir()


def _create(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"--out {path}: expected a folder, got a file. Choose another."
        ) from error
    except PermissionError as error:
        raise ConfigError(f"--out {path}: cannot be created: {error.strerror}.") from error


def _take(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock.fileno()).st_nlink == 0:  # removed by a run that was refused just now
            raise BlockingIOError
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        raise StateError(
            f"{path}: another run is training in this folder (process {holder}). "
            "Wait for it, stop it, or give another folder with --out."
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    with full_disk_explained(path, "writing the lock file"):
        lock.flush()


def _refuse_earlier_run(folder: RunFolder) -> None:
    holds = [path.name for path in (folder.summary,) if path.exists()]
    holds += [f"checkpoints/{path.name}" for path in iteration_folders(folder.checkpoints)]
    if holds:
        raise StateError(
            f"{folder.path}: already holds a run ({', '.join(holds[:3])}"
            f"{', ...' if len(holds) > 3 else ''}). Continue it with --resume, or start a new "
            "one in another folder with --out."
        )
