"""Builds byte-level Megatron datasets from plain files: one token per byte, 256 ends a document.

A dataset consists of ``train``, ``validation`` and ``test`` as ``.bin`` and ``.idx``, and of
``dataset.json``, which is written last.
"""

import contextlib
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moe_optim.commands.console.files import write_atomically
from moe_optim.errors import ConfigError, StateError
from moe_optim.screen import quiet

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_TRAIN_END, _VALIDATION_END = 0.96, 0.98
_LEAST_HELD_OUT_SHARE = 0.005  # minimum share of bytes for a split by whole files
_NO_TEXT_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


class TextFile(NamedTuple):
    """One input file; its name, the path below the given folder, determines the split."""

    path: Path
    name: str
    size: int


class Span(NamedTuple):
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


def require_text_paths(paths: Sequence[Path]) -> None:
    """Raise ConfigError for a path that is neither a file nor a folder."""
    for path in paths:
        if not (path.is_file() or path.is_dir()):
            raise ConfigError(f"--text {path}: expected a file or a folder. Correct the path.")


def find_text(paths: Sequence[Path]) -> list[TextFile]:
    """Return all files named by or below ``paths``, each once, in a fixed order.

    Hidden and empty files, and ``__pycache__``, are skipped in folders. ConfigError for a path
    without readable text.
    """
    require_text_paths(paths)
    found: dict[Path, TextFile] = {}
    for path in paths:
        if path.is_dir():
            files = list(_walk(path))
        else:
            files = [file for file in [_describe(path, path.name)] if file.size]
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
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path}: cannot be read: permission denied.")
    return TextFile(path, name, path.stat().st_size)


def split_text(files: Sequence[TextFile]) -> dict[Split, list[Span]]:
    """Split ``files`` deterministically into 96% training, 2% validation and 2% test text.

    Whole files are assigned by a hash of their names if that leaves at least 0.5% of the bytes to
    each held-out split; otherwise every file is cut at 96% and 98% of its bytes.
    """
    by_file: dict[Split, list[Span]] = {split: [] for split in SPLITS}
    cut: dict[Split, list[Span]] = {split: [] for split in SPLITS}
    for file in files:
        digest = hashlib.sha256(file.name.encode(errors="surrogateescape")).digest()
        place = int.from_bytes(digest[:8]) / 2**64
        split = SPLITS[(place >= _TRAIN_END) + (place >= _VALIDATION_END)]
        by_file[split].append(Span(file, 0, file.size))
        ends = (0, int(file.size * _TRAIN_END), int(file.size * _VALIDATION_END), file.size)
        for split, start, end in zip(SPLITS, ends, ends[1:], strict=False):
            if end > start:
                cut[split].append(Span(file, start, end))
    least = _LEAST_HELD_OUT_SHARE * sum(file.size for file in files)
    sizes = [sum(span.end for span in by_file[split]) for split in SPLITS]
    return by_file if by_file["train"] and min(sizes) >= least else cut


END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
"""All bytes, and the end of a document, which Megatron's NullTokenizer puts last."""

_CHUNK_BYTES = 16 * 2**20
_FACTS = "dataset.json"


@dataclass(frozen=True, kw_only=True)
class ByteDataset:
    """A dataset on the disk."""

    folder: Path
    documents: Mapping[Split, int]
    bytes: Mapping[Split, int]
    """Text bytes of each split; every document adds one token."""
    byte_entropy: float
    """Unigram entropy of the validation bytes in nats per byte: the loss without context."""

    def tokens(self, split: Split) -> int:
        """Return the number of tokens of a split."""
        return self.bytes[split] + self.documents[split]

    def megatron_argv(self, index_cache: Path) -> list[str]:
        """Return the Megatron flags that train on this dataset.

        ``index_cache`` is the folder of Megatron's sample index; running jobs must not share it.
        """
        return [
            *("--train-data-path", str(self.folder / "train")),
            *("--valid-data-path", str(self.folder / "validation")),
            *("--test-data-path", str(self.folder / "test")),
            *("--data-cache-path", str(index_cache)),
            *("--tokenizer-type", "NullTokenizer"),
            *("--vocab-size", str(VOCABULARY_SIZE)),
        ]

    def require_sequence_length(self, sequence_length: int) -> None:
        """Raise ConfigError if a split is shorter than one sample."""
        for split in SPLITS:
            if self.tokens(split) <= sequence_length:
                raise ConfigError(
                    f"{split} text: expected more than {sequence_length} bytes, one sample of "
                    f"--seq-length {sequence_length}, got {self.bytes[split]}. Give more text "
                    "with --text, or a shorter --seq-length after `--`."
                )


def build_dataset(files: Sequence[TextFile], folder: Path) -> ByteDataset:
    """Write the dataset of ``files``, at least one; ConfigError if one can no longer be read."""
    folder.mkdir(exist_ok=True)
    spans = split_text(files)
    counts = {split: _write_split(spans[split], folder / split) for split in SPLITS}
    shares = counts["validation"][counts["validation"] > 0] / counts["validation"].sum()
    facts: dict[str, Any] = {
        "documents": {split: len(spans[split]) for split in SPLITS},
        "bytes": {split: int(counts[split].sum()) for split in SPLITS},
        "byte_entropy": float((shares * np.log(1 / shares)).sum()),
    }
    write_atomically(folder / _FACTS, (json.dumps(facts, indent=1) + "\n").encode())
    return ByteDataset(folder=folder, **facts)


def load_dataset(folder: Path) -> ByteDataset | None:
    """Return a finished dataset; None if there is none, StateError if it is damaged."""
    try:
        facts = json.loads((folder / _FACTS).read_text())
        return ByteDataset(folder=folder, **facts)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{folder / _FACTS}: expected the facts of a dataset, got: {error}. Start a new run."
        ) from error


def _write_split(spans: Sequence[Span], prefix: Path) -> npt.NDArray[np.int64]:
    """Write one document per span and return the count of each byte: [256] int64."""
    import torch

    with quiet():  # hides Megatron's warnings about missing GPUs, TE and apex
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    counts = np.zeros(256, dtype=np.int64)
    builder = IndexedDatasetBuilder(str(prefix.with_suffix(".bin")), dtype=np.uint16)
    try:
        for span in spans:
            for start in range(span.start, span.end, _CHUNK_BYTES):
                end = min(start + _CHUNK_BYTES, span.end)
                text = _read(span.file.path, start, end)
                counts += np.bincount(text, minlength=256)
                # Megatron shuffles items, so an item never consists of the document end alone.
                tokens = np.full(len(text) + (end == span.end), END_OF_DOCUMENT, dtype=np.uint16)
                tokens[: len(text)] = text
                builder.add_item(torch.from_numpy(tokens))
            builder.end_document()
        builder.finalize(str(prefix.with_suffix(".idx")))
    finally:
        with contextlib.suppress(OSError):  # on a full disk the first error counts
            builder.data_file.close()
    return counts


def _read(path: Path, start: int, end: int) -> npt.NDArray[np.uint8]:
    try:
        text = np.fromfile(path, dtype=np.uint8, count=end - start, offset=start)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    if len(text) == end - start:
        return text
    raise ConfigError(f"{path}: became shorter while it was read. Start again.")
