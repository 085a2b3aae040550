"""Finding out what a path holds, and opening it."""

from pathlib import Path

from moe_optim.checkpoints.folders import TRACKER
from moe_optim.checkpoints.reader import CheckpointReader
from moe_optim.checkpoints.safetensors_files import SafetensorsReader, is_safetensors
from moe_optim.checkpoints.stored_metadata import METADATA
from moe_optim.checkpoints.torch_dist import CONFIG_FILE, TorchDistReader
from moe_optim.errors import LayoutError, StateError


def open_checkpoint(path: Path) -> CheckpointReader:
    """Open a checkpoint of either format; its ``path`` says which one of several was taken.

    Args:
        path: a torch_dist folder; the folder above, whose tracker file names the newest; a
            safetensors file, or a folder of them.

    Raises:
        StateError: nothing there, or it is damaged.
        LayoutError: something else is there.
    """
    if not path.exists():
        raise StateError(f"{path}: expected a checkpoint, got no such file or folder.")
    if (folder := _newest_folder(path)) is not None:
        path = folder
    if path.is_dir() and any((path / name).exists() for name in (CONFIG_FILE, METADATA)):
        return TorchDistReader(path)
    if is_safetensors(path):
        return SafetensorsReader(path)
    found = sorted(entry.name for entry in path.iterdir())[:5] if path.is_dir() else [path.name]
    raise LayoutError(
        f"{path}: expected a torch_dist checkpoint (.metadata, *.distcp) or safetensors, got "
        f"{', '.join(found) or 'an empty folder'}. Give the folder that holds them."
    )


def _newest_folder(path: Path) -> Path | None:
    """Return the folder that a tracker file names, or None where there is no such file."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    said = tracker.read_text(errors="replace").strip()
    name = f"iter_{int(said):07d}" if said.isdigit() else said
    if name not in {entry.name for entry in path.iterdir() if entry.is_dir()}:
        raise StateError(
            f"{tracker}: expected the iteration of a folder beside it, got '{said[:40]}'. "
            "Give one of the iter_* folders."
        )
    return path / name
