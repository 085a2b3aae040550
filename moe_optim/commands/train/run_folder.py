"""The folder of one training run.

::

    RUN/checkpoints/      Megatron's torch_dist checkpoints and its tracker file
    RUN/logs/             stdout.log and stderr.log of every rank and launch
    RUN/tensorboard/      event files of every launch
    RUN/arguments.json    arguments of the run, inherited by a resumed run
    RUN/index_cache/      Megatron's sample index of the dataset; rebuilt by every launch
    RUN/model.json        description of the model that rank 0 trained
    RUN/summary.json      written last, when the run has finished
    RUN/report/           written by `moe-optim report`: index.html and its plots
    RUN/.lock             held by the launcher during the run
"""

import argparse
import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_optim.checkpoint.files.folders import iteration_folders
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.checkpoint.files.untrusted_files import parse_json
from moe_optim.commands.console.files import full_disk_explained, write_atomically
from moe_optim.commands.console.json_forms import find_misfit
from moe_optim.errors import ConfigError, StateError
from moe_optim.integration.argv import data_flags, flags, last_value, without_options

OVERRIDE_SCHEDULE = "--override-opt_param-scheduler"
CKPT_STEP = "--ckpt-step"
_OF_ONE_LOAD = (
    CKPT_STEP,
    OVERRIDE_SCHEDULE,
    "--use-checkpoint-opt_param-scheduler",
    "--load",
    "--finetune",
    "--no-load-optim",
    "--no-load-rng",
)
"""Megatron flags that apply to a single load of a checkpoint."""
_RATES = ("--lr", "--min-lr", "--decoupled-lr", "--decoupled-min-lr")


class RunFolder:
    """Paths of one run; creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.index_cache = path / "index_cache"
        self.arguments = path / "arguments.json"
        self.model = path / "model.json"
        self.summary = path / "summary.json"
        self.report = path / "report"

    @property
    def is_taken(self) -> bool:
        """Whether the folder contains results of a run."""
        left = self.checkpoints, self.tensorboard, self.model, self.summary
        return any(path.exists() for path in left)


@contextlib.contextmanager
def claim(path: Path, *, resume: bool) -> Iterator[RunFolder]:
    """Create a run folder, unless it is resumed, and hold its lock, which excludes other runs.

    Raises:
        StateError: another run holds the folder; or the folder contains results, and ``resume`` is
            not set; or ``resume`` is set, and the folder does not exist.
        ConfigError: ``path`` cannot be a folder, or is not writable.
    """
    folder = RunFolder(path)
    if resume and not path.is_dir():
        raise StateError(
            f"--resume: expected the folder of a run, got no folder {path}. Name that of the run "
            "with --out, or start a new one without --resume."
        )
    require_writable(path, expected="a folder")
    with full_disk_explained(path, "creating the run folder"):
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
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
        yield folder


@dataclass(frozen=True)
class Record:
    """Arguments of a run, inherited when it is resumed."""

    set: list[str]
    megatron_args: list[str]
    text: list[str] | None
    """Absolute paths of ``--text``, empty for the standard library; None for Megatron's data."""


def write_record(folder: RunFolder, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Record the arguments of a launch; ``argv`` contains all of its Megatron flags."""
    text = None if data_flags(argv) else [str(path.absolute()) for path in args.text]
    kept = without_options(args.megatron_args, _OF_ONE_LOAD)
    record = Record(set=args.set, megatron_args=kept, text=text)
    write_atomically(folder.arguments, f"{json.dumps(asdict(record), indent=1)}\n".encode())


def read_record(folder: RunFolder) -> Record | None:
    """Return the arguments of the run; None if they were not recorded.

    Raises:
        StateError: the record is damaged.
    """
    if not folder.arguments.is_file():
        return None
    try:
        content = parse_json(folder.arguments.read_bytes())
        record = Record(**content)
        misfit = find_misfit(content, dict.fromkeys(("set", "megatron_args", "text"), [str]))
        if misfit or None in (record.set, record.megatron_args):
            raise TypeError(misfit or "null")
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{folder.arguments}: expected the arguments of the run, got something else: "
            f"{error}. Remove the file, and give all arguments that the run was started with."
        ) from error
    return record


def inherit(args: argparse.Namespace, folder: RunFolder, record: Record) -> argparse.Namespace:
    """Return ``args`` completed by the recorded arguments; new values override them."""
    data = data_flags(args.megatron_args)
    given = [str(path.absolute()) for path in args.text]
    if (record.text is not None and data) or (given and given != record.text):
        began = "Megatron's data" if record.text is None else " ".join(record.text)
        raise ConfigError(
            f"{data[0] if data else '--text'}: expected {began or 'the standard library'}, which "
            f"{folder.path} began to train on, got {' '.join(given) or 'other data'}. Leave it "
            "out, or start a new run in another folder with --out."
        )
    old = without_options(record.megatron_args, _given_anew(args))
    taken = {
        "set": [*record.set, *args.set],
        "megatron_args": [*old, *args.megatron_args],
        "text": list(map(Path, record.text or [])),
    }
    return argparse.Namespace(**vars(args) | taken)


def _given_anew(args: argparse.Namespace) -> set[str]:
    """Return the Megatron flags set by ``args``, and those that they exclude."""
    found = {*flags(args.megatron_args)}
    found |= {one.partition("=")[0].removeprefix("megatron_args.") for one in args.set}
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        if f"--train-{unit}" in found:  # Megatron counts a whole run in one unit
            found |= {f"--{one}-{other}" for one in ("train", "lr-decay", "lr-warmup")}
    return found


def refuse_other_rates(old: Sequence[str], new: Sequence[str], *, stock: bool) -> None:
    """Refuse a learning rate for which Megatron 0.19 would not find its saved optimizer state.

    Args:
        old: recorded Megatron flags of the run.
        new: current Megatron flags.
        stock: whether Megatron's own optimizer loads the state; no flag helps then.
    """
    for flag in _RATES:
        before, now = last_value(old, flag), last_value(new, flag)
        if _is_same_number(before, now) or (OVERRIDE_SCHEDULE in new and not stock):
            continue
        remedy = "train without --stock" if stock else f"add {OVERRIDE_SCHEDULE}"
        raise ConfigError(
            f"{flag}: expected {before}, as the run was started, got {now}. Leave it out to go on "
            f"as before; to go on with another, {remedy}."
        )


def _is_same_number(one: str | None, other: str | None) -> bool:
    try:
        return one == other or float(one or "") == float(other or "")
    except ValueError:
        return False
