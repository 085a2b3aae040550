"""Finds the training text and splits it into training, validation and test text."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_optim.errors import ConfigError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_TRAIN_END, _VALIDATION_END = 0.96, 0.98
_LEAST_HELD_OUT_SHARE = 0.005  # minimum share of bytes for a split by whole files
_NO_TEXT_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class TextFile:
    """One input file."""

    path: Path
    name: str
    """Path below the given folder; determines the split."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file: one document of a split."""

    file: TextFile
    start: int
    end: int


def standard_library_text() -> list[TextFile]:
    """Return the standard library's ``.py`` files, without its tests; ConfigError without any."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, skip=_NO_TEXT_FOLDERS) if file.path.suffix == ".py"]
    if not files:
        raise ConfigError(
            f"{root}: expected the Python standard library's sources, found no .py files. "
            "Give your own text with --text."
        )
    return files


def find_text(paths: Sequence[Path]) -> list[TextFile]:
    """Return all files named by or below ``paths``, each once, in a fixed order.

    Hidden and empty files, and ``__pycache__``, are skipped in folders.

    Raises:
        ConfigError: a path does not exist, cannot be read, or contains no text.
    """
    found: dict[Path, TextFile] = {}
    for path in paths:
        if path.is_dir():
            files = list(_walk(path))
        elif path.is_file():
            files = [file for file in [_describe(path, path.name)] if file.size]
        else:
            raise ConfigError(f"--text {path}: expected a file or a folder. Correct the path.")
        if not files:
            raise ConfigError(f"--text {path}: expected text, found none. Name other text.")
        for file in files:
            found.setdefault(file.path.resolve(), file)
    return [found[path] for path in sorted(found)]


def _walk(root: Path, skip: Set[str] = frozenset({"__pycache__"})) -> Iterator[TextFile]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}.") from error

    for folder, folders, names in root.walk(on_error=refuse):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in skip)
        for name in sorted(names):
            path = folder / name
            if name[0] != "." and path.is_file():
                file = _describe(path, path.relative_to(root).as_posix())
                if file.size:
                    yield file


def _describe(path: Path, name: str) -> TextFile:
    status = path.stat()
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path}: cannot be read: permission denied.")
    return TextFile(path, name, status.st_size, status.st_mtime_ns)


def split_text(files: Sequence[TextFile]) -> dict[Split, list[Span]]:
    """Split ``files`` deterministically into 96% training, 2% validation and 2% test text.

    Whole files are assigned by a hash of their names if that leaves at least 0.5% of the bytes to
    each held-out split; otherwise every file is cut at 96% and 98% of its bytes.
    """
    by_file: dict[Split, list[Span]] = {split: [] for split in SPLITS}
    for file in files:
        by_file[_split_of(file.name)].append(Span(file, 0, file.size))
    least = _LEAST_HELD_OUT_SHARE * sum(file.size for file in files)
    if by_file["train"] and all(_bytes_of(by_file[split]) >= least for split in SPLITS):
        return by_file
    cut: dict[Split, list[Span]] = {split: [] for split in SPLITS}
    for file in files:
        ends = (0, int(file.size * _TRAIN_END), int(file.size * _VALIDATION_END), file.size)
        for split, start, end in zip(SPLITS, ends, ends[1:], strict=False):
            if end > start:
                cut[split].append(Span(file, start, end))
    return cut


def _split_of(name: str) -> Split:
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    place = int.from_bytes(digest[:8]) / 2**64
    if place < _TRAIN_END:
        return "train"
    return "validation" if place < _VALIDATION_END else "test"


def _bytes_of(spans: Sequence[Span]) -> int:
    return sum(span.end - span.start for span in spans)
