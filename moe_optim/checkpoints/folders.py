"""How Megatron names the folders of checkpoints."""

import re
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which Megatron says what to load."""

_ITERATION_FOLDER = re.compile(r"iter_\d{7,}")


def iteration_folders(checkpoints: Path) -> list[Path]:
    """Return the ``iter_*`` folders, newest first."""
    found = [path for path in checkpoints.glob("iter_*") if _ITERATION_FOLDER.fullmatch(path.name)]
    return sorted(found, key=iteration_of, reverse=True)


def iteration_of(checkpoint: Path) -> int:
    """Return the iteration a checkpoint folder ``iter_0000120`` was saved after."""
    return int(checkpoint.name.removeprefix("iter_"))
