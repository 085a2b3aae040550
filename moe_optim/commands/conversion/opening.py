"""Opens a checkpoint of either format from any path that identifies it."""

from pathlib import Path

from moe_optim.checkpoint.files.reader import CheckpointReader
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.commands.console.checkpoint_paths import find_checkpoint, is_torch_dist, readable
from moe_optim.commands.conversion.safetensors_files import SafetensorsReader


def open_checkpoint(path: Path) -> CheckpointReader:
    """Open a checkpoint of either format; its ``path`` is the one selected.

    Args:
        path: torch_dist folder; its parent, whose tracker file names the newest; the folder of a
            run, which contains ``checkpoints``; a safetensors file, or a folder of them.

    Raises:
        StateError: the path does not exist, is damaged, or was left by a killed command.
        LayoutError: the path is not a checkpoint.
    """
    path = find_checkpoint(path)
    with readable(path):
        return TorchDistReader(path) if is_torch_dist(path) else SafetensorsReader(path)
