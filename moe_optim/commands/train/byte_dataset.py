"""Byte-level Megatron datasets out of plain files: one token a byte, 256 ends a document.

A dataset is built once for a list of files (their paths, sizes and modification times) and then
reused: ``ROOT/bytes-<fingerprint>/`` with ``train``, ``validation`` and ``test`` as ``.bin`` and
``.idx``, and ``dataset.json``. It is built under another name and renamed when all of it is on the
disk, so a folder with that name is always whole.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moe_optim.checkpoint.files.publishing import synchronize
from moe_optim.commands.train.text_files import SPLITS, Span, Split, SplitBy, TextFile, split_text
from moe_optim.errors import ConfigError
from moe_optim.screen import quiet

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
"""All bytes and the end of a document, which Megatron's NullTokenizer puts last."""

_FORMAT_VERSION = 1  # of the split, the tokens and the files: a change makes other datasets
_TOKEN_BYTES = 2  # uint16, the smallest indexed dtype that holds 257 values
_CHUNK_BYTES = 16 * 2**20
_FACTS = ("split_by", "documents", "bytes", "byte_entropy")

OnBytes = Callable[[int], object]
"""Called with the number of text bytes written since the last call."""


@dataclass(frozen=True, kw_only=True)
class ByteDataset:
    """A dataset on the disk."""

    folder: Path
    split_by: SplitBy
    """Whole files went to one split each, or every file was cut at 96% and 98% of its bytes."""
    documents: Mapping[Split, int]
    bytes: Mapping[Split, int]
    """Text bytes; a split has one token more for each of its documents."""
    byte_entropy: float
    """Unigram entropy of the validation bytes in nats a byte: the loss of knowing nothing else."""

    def prefix(self, split: Split) -> Path:
        """Return the path of one split without its suffix, as Megatron's flags want it."""
        return self.folder / split

    def tokens(self, split: Split) -> int:
        """Return how many tokens a split has."""
        return self.bytes[split] + self.documents[split]


def prepare_dataset(
    files: Sequence[TextFile], root: Path, *, on_bytes: OnBytes = lambda _count: None
) -> tuple[ByteDataset, bool]:
    """Return the dataset of ``files`` below ``root`` and whether it had to be built.

    Imports megatron-core only to build, which takes seconds. A second process that wants the same
    dataset waits until the first has built it.

    Args:
        files: from :func:`find_text` or :func:`standard_library_text`; not empty.
        root: folder of all datasets; created.
        on_bytes: called with the number of text bytes written since the last call.

    Raises:
        ConfigError: a file can no longer be read.
        OSError: the disk is full; nothing of the dataset is left.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"bytes-{fingerprint(files)}"
    with _exclusive(root / f".{folder.name}.lock"):
        dataset = _load(folder)
        if dataset is not None:
            return dataset, False
        return _build(files, folder, on_bytes), True


def fingerprint(files: Sequence[TextFile]) -> str:
    """Return 12 hex digits that change with any path, size or modification time."""
    parts = [(str(file.path.resolve()), file.name, file.size, file.mtime_ns) for file in files]
    text = json.dumps([_FORMAT_VERSION, parts])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load(folder: Path) -> ByteDataset | None:
    """Read a finished dataset; None where there is none or its files have been tampered with."""
    try:
        facts = json.loads((folder / "dataset.json").read_text())
        dataset = ByteDataset(folder=folder, **{key: facts[key] for key in _FACTS})
    except (OSError, ValueError, KeyError):
        return None
    return dataset if all(_is_whole(dataset, split) for split in SPLITS) else None


def _is_whole(dataset: ByteDataset, split: Split) -> bool:
    index, tokens = (dataset.prefix(split).with_suffix(suffix) for suffix in (".idx", ".bin"))
    nbytes = dataset.tokens(split) * _TOKEN_BYTES
    return index.is_file() and tokens.is_file() and tokens.stat().st_size == nbytes


def _build(files: Sequence[TextFile], folder: Path, on_bytes: OnBytes) -> ByteDataset:
    """Write all splits under a partial name and rename it; the caller holds the lock."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
    shutil.rmtree(folder, ignore_errors=True)  # of a dataset that was damaged
    partial.mkdir()
    try:
        dataset = _write_splits(files, partial, on_bytes)
        facts: dict[str, object] = {key: getattr(dataset, key) for key in _FACTS}
        facts["files"] = [str(file.path) for file in files]
        (partial / "dataset.json").write_text(json.dumps(facts, indent=1) + "\n")
        synchronize(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return replace(dataset, folder=folder)


def _write_splits(files: Sequence[TextFile], folder: Path, on_bytes: OnBytes) -> ByteDataset:
    split_by, spans = split_text(files)
    counts = {split: _write_split(spans[split], folder / split, on_bytes) for split in SPLITS}
    return ByteDataset(
        folder=folder,
        split_by=split_by,
        documents={split: len(spans[split]) for split in SPLITS},
        bytes={split: int(counts[split].sum()) for split in SPLITS},
        byte_entropy=entropy(counts["validation"]),
    )


def _write_split(spans: Sequence[Span], prefix: Path, on_bytes: OnBytes) -> npt.NDArray[np.int64]:
    """Write one document a span and return how often each byte occurred: [256] int64."""
    counts = np.zeros(256, dtype=np.int64)
    builder = _new_builder(prefix.with_suffix(".bin"))
    try:
        for span in spans:
            for start in range(span.start, span.end, _CHUNK_BYTES):
                end = min(start + _CHUNK_BYTES, span.end)
                text = _read(span.file.path, start, end)
                counts += np.bincount(text, minlength=256)
                _add_item(builder, text, ends_document=end == span.end)
                on_bytes(end - start)
            builder.end_document()
        builder.finalize(str(prefix.with_suffix(".idx")))
    finally:
        with contextlib.suppress(OSError):  # on a full disk the first error is the one that counts
            builder.data_file.close()
    return counts


def _new_builder(path: Path) -> "IndexedDatasetBuilder":
    """Import Megatron without its remarks on the absence of GPUs, TE and apex; they come later."""
    with quiet():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    return IndexedDatasetBuilder(str(path), dtype=np.uint16)


def _read(path: Path, start: int, end: int) -> npt.NDArray[np.uint8]:
    try:
        text = np.fromfile(path, dtype=np.uint8, count=end - start, offset=start)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    if len(text) < end - start:
        raise ConfigError(f"{path}: became shorter while it was read. Start again.")
    return text


def _add_item(
    builder: "IndexedDatasetBuilder", text: npt.NDArray[np.uint8], *, ends_document: bool
) -> None:
    """Append one item; Megatron shuffles items, so the end of a document is never one alone."""
    import torch

    tokens = np.full(len(text) + ends_document, END_OF_DOCUMENT, dtype=np.uint16)
    tokens[: len(text)] = text
    builder.add_item(torch.from_numpy(tokens))


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy in nats of the distribution that ``counts`` are proportional to."""
    shares = counts[counts > 0] / counts.sum()
    return float((shares * np.log(1 / shares)).sum())


def require_sequence_length(dataset: ByteDataset, sequence_length: int) -> None:
    """Raise ConfigError for a dataset of which some split cannot fill a single sample."""
    for split in SPLITS:
        if dataset.tokens(split) <= sequence_length:
            raise ConfigError(
                f"{split} text: expected more than {sequence_length} bytes, one sample of "
                f"--seq-length {sequence_length}, got {dataset.bytes[split]}. Give more text with "
                "--text, or a shorter --seq-length after `--`."
            )


def dataset_argv(dataset: ByteDataset, index_cache: Path) -> list[str]:
    """Return the Megatron flags that train on ``dataset``.

    ``index_cache`` is where Megatron may keep its sample index; not shared between running jobs.
    """
    return [
        *("--train-data-path", str(dataset.prefix("train"))),
        *("--valid-data-path", str(dataset.prefix("validation"))),
        *("--test-data-path", str(dataset.prefix("test"))),
        *("--data-cache-path", str(index_cache)),
        *("--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(VOCABULARY_SIZE)),
    ]
