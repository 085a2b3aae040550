"""Finds the newest complete checkpoint of a run and points Megatron's tracker file at it."""

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
    """Checkpoint to resume from."""

    iteration: int
    notes: tuple[str, ...]
    """One sentence per skipped checkpoint, and one for a corrected tracker file."""


def find_resume_point(checkpoints: Path) -> ResumePoint:
    """Find the newest complete checkpoint and write its iteration to Megatron's tracker file.

    Raises:
        StateError: no checkpoint is complete, or the tracker cannot be read or written.
    """
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
