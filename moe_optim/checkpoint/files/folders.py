"""Names of Megatron's checkpoint folders."""

import re
from pathlib import Path

from moe_optim.checkpoint.files.untrusted_files import read_file

CONFIG_FILE = "metadata.json"
"""File in which Megatron records the format of a checkpoint."""
COMMON_FILE = "common.pt"
"""File in which older Megatrons keep the common state; newer ones prefer it to their own."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron records the iteration to load."""

_TRACKER_BYTES = 4096
_ITERATION_FOLDER = re.compile(r"iter_[0-9]{7,18}")


def is_local(checkpoint_dir: str | Path) -> bool:
    """Return whether files can be opened here; only Megatron reads ``msc://`` and similar URLs."""
    return "://" not in str(checkpoint_dir)


def iteration_folders(checkpoints: Path) -> list[Path]:
    """Return the ``iter_*`` folders, newest first."""
    found = [path for path in checkpoints.glob("iter_*") if _ITERATION_FOLDER.fullmatch(path.name)]
    return sorted(found, key=iteration_of, reverse=True)


def iteration_of(checkpoint: Path) -> int:
    """Return the iteration number of a checkpoint folder such as ``iter_0000120``."""
    return int(checkpoint.name.removeprefix("iter_"))


def read_tracker(checkpoints: Path) -> str | None:
    """Return the text of the tracker file, None without one; raises like :func:`read_file`."""
    try:
        content = read_file(checkpoints, TRACKER, _TRACKER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content.decode(errors="replace").strip()


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face checkpoint, and none of Megatron's."""
    is_megatron = (folder / TRACKER).exists()
    has_model = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
    return has_model and not is_megatron


def files_of_ranks(checkpoint: Path) -> list[Path]:
    """Return all per-rank files of ``--ckpt-format torch``; empty for other formats."""
    is_torch_dist = any([(checkpoint / name).exists() for name in (CONFIG_FILE, ".metadata")])
    return [] if is_torch_dist else sorted(checkpoint.glob("mp_rank_*/*.pt"))
