"""Which checkpoints of a run are whole, and pointing Megatron at the newest of them."""

from dataclasses import dataclass
from pathlib import Path

from moe_optim.checkpoint.files.folders import (
    TRACKER,
    iteration_folders,
    iteration_of,
    read_tracker,
)
from moe_optim.checkpoint.files.publishing import DISK_FULL
from moe_optim.checkpoint.integrity import checkpoint_defect
from moe_optim.commands.console.files import write_atomically
from moe_optim.errors import StateError


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint a run continues from, and what had to be passed over to find it."""

    iteration: int
    notes: tuple[str, ...]
    """One sentence a skipped checkpoint, and one for a mended tracker file."""


def find_resume_point(checkpoints: Path) -> ResumePoint:
    """Find the newest complete checkpoint and point Megatron's tracker file at it.

    Raises:
        StateError: there is no complete checkpoint; every incomplete one is named with its defect.
            Or the tracker file is none.
    """
    skipped: list[str] = []
    for checkpoint in iteration_folders(checkpoints):
        defect = checkpoint_defect(checkpoint)
        if defect is None:
            iteration = iteration_of(checkpoint)
            return ResumePoint(iteration, (*skipped, *_mend_tracker(checkpoints, iteration)))
        skipped.append(f"skipped the incomplete checkpoint {checkpoint.name}: {defect}")
    found = "; ".join(skipped) if skipped else "it holds none at all"
    raise StateError(
        f"--resume: {checkpoints} holds no complete checkpoint ({found}). "
        "Start a new run without --resume in another folder with --out."
    )


def newest_complete_checkpoint(checkpoints: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint, or None; changes nothing."""
    for checkpoint in iteration_folders(checkpoints):
        if checkpoint_defect(checkpoint) is None:
            return iteration_of(checkpoint)
    return None


def _mend_tracker(checkpoints: Path, iteration: int) -> list[str]:
    tracker = checkpoints / TRACKER
    try:
        said = read_tracker(checkpoints)
        if said == str(iteration):
            return []
        write_atomically(tracker, str(iteration).encode())
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise StateError(
            f"{error.filename or tracker}: expected a file with an iteration, got: "
            f"{error.strerror}. Remove it."
        ) from error
    return [f"set {TRACKER} to {iteration} (it was {_shown(said)})"]


def _shown(said: str | None) -> str:
    if said is None:
        return "missing"
    return (said if said.isprintable() else repr(said))[:40] or "empty"
