"""Finds a checkpoint from any path that identifies it, and its format, without importing torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_optim.checkpoint.files.folders import CONFIG_FILE, TRACKER, files_of_ranks, read_tracker
from moe_optim.checkpoint.files.metadata import METADATA
from moe_optim.checkpoint.files.publishing import is_partial
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.experts.keys.layouts import STORED_ALIKE

CHECKPOINTS = "checkpoints"  # subfolder of a run that contains its checkpoints
SUFFIX, INDEX_FILE = ".safetensors", "model.safetensors.index.json"
"""Suffix of safetensors files, and the file that names those of a folder."""
_MOST_DIGITS = 18  # maximum of an iteration


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path identifies, which looks like one of either format.

    ``path`` is a torch_dist folder; its parent, whose tracker file names the newest; the folder of
    a run, which contains ``checkpoints``; a safetensors file, or a folder of them. StateError if it
    does not exist, cannot be read, or was left by a killed command; LayoutError if it is none.
    """
    path = newest_checkpoint(path)
    with readable(path):
        _require_checkpoint(path)
    return path


def newest_checkpoint(path: Path) -> Path:
    """Return the path itself, or the newest checkpoint of a run or of a folder of checkpoints."""
    with readable(path):
        if not path.exists():
            raise StateError(f"{path}: expected a checkpoint, got no such file or folder.")
        inside = path / CHECKPOINTS
        is_run = read_tracker(path) is None and read_tracker(inside) is not None
        return _newest_folder(inside if is_run else path) or path


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a StateError about ``path``."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: expected a checkpoint, got: {error.strerror}. Give a folder or file that can "
            "be read."
        ) from error


def is_torch_dist(path: Path) -> bool:
    """Return whether a path looks like torch_dist, complete or not."""
    return path.is_dir() and any((path / name).exists() for name in (CONFIG_FILE, METADATA))


def is_safetensors(path: Path) -> bool:
    """Return whether a path looks like safetensors, complete or not."""
    if path.is_dir():
        return (path / INDEX_FILE).exists() or any(path.glob(f"*{SUFFIX}"))
    return path.suffix == SUFFIX


def require_target(layout: str, format: str, interleave: int | None) -> None:
    """Raise ConfigError unless a format can store a layout of experts with a GLU interleave."""
    if layout in STORED_ALIKE:
        return
    if format == "torch_dist":
        raise ConfigError(
            f"--experts {layout}: expected one of {', '.join(STORED_ALIKE)} for torch_dist, which "
            "stores these alike and no other. Add --format safetensors."
        )
    if interleave:
        raise ConfigError(
            f"--experts {layout}: expected a GLU interleave of 0, as all gate rows come first, got "
            f"{interleave}. Drop --glu-interleave."
        )


def _require_checkpoint(path: Path) -> None:
    if is_partial(path):
        raise StateError(f"{path}: a command was killed while it wrote this. Run it again.")
    if is_torch_dist(path) or is_safetensors(path):
        return
    if files_of_ranks(path):
        raise LayoutError(
            f"{path}: expected a checkpoint of the whole model, got one file per rank, as "
            "--ckpt-format torch writes it. `moe-optim inspect` checks it; for everything else, "
            "let a run convert it (--ckpt-convert-format torch_dist --ckpt-convert-save DIR), "
            "and give DIR/torch_dist."
        )
    found = "another file"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())[:5]
        shown = ", ".join(name if name.isprintable() else repr(name) for name in names)
        found = f"a folder with {shown}" if names else "an empty folder"
    raise LayoutError(
        f"{path}: expected a torch_dist checkpoint (.metadata, *.distcp) or safetensors, got "
        f"{found}. Give the folder that holds them."
    )


def _newest_folder(path: Path) -> Path | None:
    said = read_tracker(path)
    if said is None:
        return None
    is_number = said.isascii() and said.isdecimal() and len(said) <= _MOST_DIGITS
    name = f"iter_{int(said):07d}" if is_number else said
    if name not in {entry.name for entry in path.iterdir() if entry.is_dir()}:
        raise StateError(
            f"{path / TRACKER}: expected the iteration of a folder beside it, got {said[:40]!r}. "
            "Give one of the iter_* folders."
        )
    return path / name
