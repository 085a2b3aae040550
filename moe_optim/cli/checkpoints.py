"""Which checkpoints of a run are whole, and pointing Megatron at the newest of them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from moe_optim.cli.files import write_atomically
from moe_optim.errors import StateError

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION_FOLDER = re.compile(r"iter_\d{7,}")


def iteration_folders(checkpoints: Path) -> list[Path]:
    """Return the ``iter_*`` folders, newest first."""
    found = [path for path in checkpoints.glob("iter_*") if _ITERATION_FOLDER.fullmatch(path.name)]
    return sorted(found, key=iteration_of, reverse=True)


def iteration_of(checkpoint: Path) -> int:
    """Return the iteration a checkpoint folder ``iter_0000120`` was saved after."""
    return int(checkpoint.name.removeprefix("iter_"))


def checkpoint_defect(checkpoint: Path) -> str | None:
    """Say why a torch_dist checkpoint cannot be loaded, or None when it is complete.

    Complete means: Megatron's ``metadata.json``, written when all ranks are done; torch's
    ``.metadata``; and every byte range that ``.metadata`` names lies within an existing file.
    The state that is not sharded is either such a range or, in older checkpoints, ``common.pt``.
    """
    try:
        json.loads((checkpoint / "metadata.json").read_text())
    except FileNotFoundError:
        return "no metadata.json"
    except ValueError:
        return "metadata.json is cut off"
    ends, holds_common = _stored_extents(checkpoint)
    if ends is None:
        return ".metadata is missing or cut off"
    for name, end in ends.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else -1
        if size < end:
            return f"{name} is missing" if size < 0 else f"{name} is cut off"
    return None if holds_common or (checkpoint / "common.pt").is_file() else "no common state"


def _stored_extents(checkpoint: Path) -> tuple[dict[str, int] | None, bool]:
    """Return how long each file that ``.metadata`` names must be, and if it has common state.

    ``None`` in place of the files: ``.metadata`` cannot be read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception:  # whatever a cut off pickle makes of itself
        return None, False
    ends: dict[str, int] = {}
    for extent in (metadata.storage_data or {}).values():
        end = extent.offset + extent.length
        ends[extent.relative_path] = max(end, ends.get(extent.relative_path, 0))
    holds_common = any(key.startswith("common_state") for key in metadata.state_dict_metadata)
    return ends, holds_common


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
    said = tracker.read_text(errors="replace").strip() if tracker.is_file() else "missing"
    if said == str(iteration):
        return []
    write_atomically(tracker, str(iteration).encode())
    return [f"set {TRACKER} to {iteration} (it was {said or 'empty'})"]
