"""Integrity checks: the files of a checkpoint are complete and unchanged since the save.

A *quick* check reads metadata and file sizes, a *thorough* one reads everything once. Coverage
depends on what was recorded at save time:

- Nothing: keys, byte ranges, shapes and dtypes in ``.metadata`` must be consistent with each other
  and with the file sizes; thorough verifies the CRC-32 of every record and compares every tensor's
  archive with ``.metadata``. Not detected: a file of another checkpoint with the same layout, and a
  renamed key, until it is requested.
- Checksum manifest (:func:`record_checksums`): also verifies the metadata bytes and, thorough, the
  CRC-32 values themselves. Detects both cases above, and missing files or a killed save of
  ``--ckpt-format torch``.
- Megatron's ``integrity.json`` (``--verify-integrity``): thorough also verifies the SHA-256 of
  every loaded file, including bits that nothing reads, such as archive timestamps.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO

from moe_optim.checkpoint.files.archives import Archive, reason_of
from moe_optim.checkpoint.files.checksum_manifest import (
    CHECKSUM_MANIFEST,
    MEGATRONS_MANIFEST,
    Checksums,
    CorruptFile,
    DamageError,
    read_checksums,
    remove_record,
    sha256_of,
    write_checksums,
)
from moe_optim.checkpoint.files.folders import files_of_ranks, iteration_folders, iteration_of
from moe_optim.checkpoint.files.metadata import METADATA, Blob, read_blobs, read_metadata
from moe_optim.checkpoint.files.untrusted_files import (
    file_range,
    is_file,
    open_file,
    parse_json,
    read_file,
    size_of,
)
from moe_optim.errors import StateError

_CONFIG = "metadata.json"
_BACKEND = "torch_dist"
_COMMON = "common.pt"  # in torch_dist checkpoints of older Megatron versions
_LEGACY_MODEL = "model_optim_rng.pt"


def checkpoint_defect(checkpoint: Path) -> str | None:
    """Return why ``checkpoint``, an iteration folder, cannot be loaded, None if it is complete.

    This is the quick check. A torch_dist checkpoint is complete with ``metadata.json`` (written
    when all ranks are done), ``.metadata``, every file that it names at full length, and the common
    state; ``--ckpt-format torch`` with a model in every ``mp_rank_*`` folder and no truncated file.
    No rank communicates.
    """
    return next((str(defect) for defect in _Check(Path(checkpoint)).defects()), None)


def corrupt_files(checkpoint: Path, *, part: int = 0, parts: int = 1) -> Iterator[CorruptFile]:
    """Yield every defect of a checkpoint: the thorough check.

    Memory stays below a few ``archives.BLOCK_BYTES`` plus ``.metadata``. Ranks may split the bytes;
    each of them runs the quick check.

    Args:
        checkpoint: folder of one iteration.
        part: index of the share of bytes to read.
        parts: number of shares.
    """
    return _Check(Path(checkpoint)).defects(thorough=True, part=part, parts=parts)


def require_intact(
    checkpoint: Path, *, thorough: bool, part: int = 0, parts: int = 1
) -> Sequence[Blob]:
    """Refuse a checkpoint with missing or damaged files. No rank communicates.

    Ranks that split the reading must exchange the outcome before they continue.

    Args:
        checkpoint: folder of one iteration.
        thorough: True to read everything, False for metadata and sizes only.
        part: index of the share of bytes to read.
        parts: number of shares.

    Returns:
        Content of ``.metadata``; empty for ``--ckpt-format torch``.

    Raises:
        StateError: files are defective; lists all of them, and the newest complete checkpoint in
            the same folder.
    """
    check = _Check(Path(checkpoint))
    check.require_none(check.defects(thorough=thorough, part=part, parts=parts))
    return check.blobs


def record_checksums(checkpoint: Path) -> None:
    """Write the checksum manifest of ``checkpoint``, a complete iteration folder.

    One process must call this, after all writes. The manifest contains the SHA-256 of each metadata
    file and, for every other file, of its archive tables (names, offsets and CRCs of records). Data
    is not read again.

    Raises:
        StateError: checkpoint is incomplete, or the manifest cannot be written.
    """
    checkpoint = Path(checkpoint)
    remove_record(checkpoint, CHECKSUM_MANIFEST)
    check = _Check(checkpoint)
    check.require_none(check.defects())
    tables = {
        name: _Archives(checkpoint, name, blobs).tables_sha256()
        for name, blobs in check.archives.items()
    }
    whole = {name: check.small[name] for name in (METADATA, _CONFIG) if name in check.small}
    write_checksums(checkpoint, Checksums(whole, tables))


def invalidate(checkpoint: Path) -> None:
    """Mark ``checkpoint``, a torch_dist iteration folder, incomplete before it is overwritten.

    One process must call this before any rank writes: the old ``metadata.json`` would declare the
    folder complete. Also removes its checksums; StateError if a file cannot be removed.
    """
    for name in (_CONFIG, MEGATRONS_MANIFEST, CHECKSUM_MANIFEST):  # the first decides
        remove_record(Path(checkpoint), name)


def mark_unfinished(checkpoint: Path) -> None:
    """Mark ``checkpoint``, a ``--ckpt-format torch`` folder, incomplete until its save ends.

    One process must call this before any rank writes: per-rank files do not show whether those of
    other ranks exist and belong to the same save. Creates a missing folder.

    Raises:
        StateError: another object has the checksum manifest's name.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_checksums(checkpoint, None)


def _what_to_load(checkpoint: Path) -> str:
    for other in iteration_folders(checkpoint.parent):
        if other.name != checkpoint.name and checkpoint_defect(other) is None:
            iteration = iteration_of(other)
            return f"Load {other.name} beside it, which is complete: --ckpt-step {iteration}."
    return "No other checkpoint beside it is complete: restore its files from a copy."


class _Check:
    """One check of a checkpoint; reads its metadata once."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.checksums = Checksums()
        self.blobs: Sequence[Blob] = ()
        self.archives: dict[str, list[Blob]] = {}
        """Archives of each file, in file order."""
        self.small: dict[str, str] = {}
        """SHA-256 of each metadata file read."""

    def defects(
        self, *, thorough: bool = False, part: int = 0, parts: int = 1
    ) -> Iterator[CorruptFile]:
        """Yield defects; a fatal one is last."""
        path = self.checkpoint
        try:
            if not path.is_dir():
                what = "is a file, expected a folder" if path.exists() else "does not exist"
                raise DamageError("", f"{path.name} {what}")
            self.checksums = read_checksums(path)
            self.archives = self._read_archives()
            missing_or_cut = list(self._size_defects())
            yield from missing_or_cut
            for defect in missing_or_cut:
                self.archives.pop(defect.file, None)
            if thorough:
                yield from self._corrupt_files(part, parts)
        except DamageError as error:
            yield error.corrupt
        except OSError as error:
            yield CorruptFile(Path(error.filename or "").name, f"cannot be read: {error.strerror}")

    def require_none(self, defects: Iterator[CorruptFile]) -> None:
        """Raise StateError for defects, naming a checkpoint to load instead."""
        lines = []
        for _, of_file in groupby(defects, key=lambda defect: defect.file):
            first, *more = of_file
            lines.append(f"{first}, and {len(more)} more in it" if more else str(first))
        if lines:
            path = self.checkpoint
            raise StateError(
                f"{path}: expected every file as it was saved, got: {'; '.join(lines)}. "
                f"{_what_to_load(path)}"
            )

    def _read_archives(self) -> dict[str, list[Blob]]:
        path = self.checkpoint
        if legacy := files_of_ranks(path):
            for folder in sorted({file.parent.name for file in legacy}):
                if not is_file(path, model := f"{folder}/{_LEGACY_MODEL}"):
                    raise DamageError(model, "is missing")
            names = [str(file.relative_to(path)) for file in legacy]
            return {name: self._whole_file(name) for name in names}
        _require_backend(self._read_small(_CONFIG))
        self.blobs = read_blobs(self._read_small(METADATA))
        archives = {name: list(group) for name, group in groupby(self.blobs, lambda one: one.file)}
        if is_file(path, _COMMON):
            archives[_COMMON] = self._whole_file(_COMMON)
        elif not any(blob.key.startswith("common_state") for blob in self.blobs):
            raise DamageError(METADATA, "names no common state, and there is no common.pt")
        return archives

    def _whole_file(self, name: str) -> list[Blob]:
        return [Blob(name, 0, size_of(self.checkpoint, name), key="", offset=None)]

    def _read_small(self, name: str) -> bytes:
        path = self.checkpoint
        try:
            content = read_metadata(path) if name == METADATA else read_file(path, name)
        except FileNotFoundError as error:
            if name == _CONFIG:
                raise DamageError("", f"no {_CONFIG}: it was not saved to the end") from error
            raise DamageError(name, "is missing") from error
        except OSError as error:
            raise DamageError(name, f"cannot be read: {error.strerror}") from error
        self.small[name] = hashlib.sha256(content).hexdigest()
        if self.checksums.whole.get(name) not in (None, self.small[name]):
            raise DamageError(name, "does not have the SHA-256 that was recorded")
        return content

    def _size_defects(self) -> Iterator[CorruptFile]:
        listed = sorted(self.checksums.files - self.archives.keys() - self.small.keys())
        ends: dict[str, int | None] = dict.fromkeys(listed)
        ends |= {name: blobs[-1].end for name, blobs in self.archives.items()}
        for name, end in ends.items():
            try:
                what = _size_defect(self.checkpoint, name, end)
            except FileNotFoundError:
                what = "is missing"
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
            if what is not None:
                yield CorruptFile(name, what)

    def _corrupt_files(self, part: int, parts: int) -> Iterator[CorruptFile]:
        """Yield the defects in one share of the bytes; shares have about equal size."""
        total = max(1, sum(blobs[-1].end for blobs in self.archives.values()))
        before = 0
        for name, blobs in self.archives.items():
            ours = [blob for blob in blobs if (before + blob.start) * parts // total == part]
            before += blobs[-1].end
            if not ours:
                continue
            try:
                yield from self._corrupt_parts(_Archives(self.checkpoint, name, blobs), ours)
            except OSError as error:
                yield CorruptFile(name, f"cannot be read: {error.strerror}")

    def _corrupt_parts(self, file: "_Archives", ours: list[Blob]) -> list[CorruptFile]:
        """Return the defects in our share of a file; the first share checks the whole file, too."""
        owns_file, recorded = ours[0] is file.blobs[0], self.checksums.whole.get(file.name)
        if recorded is None:
            corrupt = list(file.corrupt(ours))
        elif owns_file and sha256_of(self.checkpoint, file.name) != recorded:
            unknown = [CorruptFile(file.name, "does not have the SHA-256 that was recorded")]
            corrupt = list(file.corrupt(file.blobs)) or unknown
        else:
            corrupt = []
        tables = self.checksums.tables.get(file.name)
        is_checked = owns_file and not corrupt and tables is not None
        if is_checked and file.tables_sha256() != tables:
            what = "has other checksums than were recorded: it is another file"
            corrupt = [CorruptFile(file.name, what)]
        return corrupt


def _size_defect(checkpoint: Path, name: str, expected: int | None) -> str | None:
    with open_file(checkpoint, name) as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected:
            return f"is {'cut off' if size < expected else 'too long'}: {size} of {expected} bytes"
        if expected is not None and name.endswith(".pt"):
            try:
                Archive(file)
            except Exception as error:  # zipfile raises arbitrary errors for damaged archives
                return reason_of(error)
    return None


def _require_backend(config: bytes) -> None:
    try:
        backend = parse_json(config)["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(_CONFIG, f"is cut off or damaged: {error}") from error
    if backend != _BACKEND:
        named = repr(backend)[:40] if isinstance(backend, str) else "none"
        raise DamageError(_CONFIG, f"names the backend {named}, expected {_BACKEND!r}")


class _Archives:
    """The archives in one file; each is opened once for both checksums and table."""

    def __init__(self, checkpoint: Path, name: str, blobs: Sequence[Blob]) -> None:
        self.checkpoint, self.name, self.blobs = checkpoint, name, blobs
        self._digests: dict[int, bytes] = {}
        """SHA-256 of the table by archive offset."""

    def corrupt(self, blobs: Sequence[Blob]) -> Iterator[CorruptFile]:
        with open_file(self.checkpoint, self.name) as file:
            for blob in blobs:
                try:
                    archive = self._open(file, blob)
                    archive.compare_checksums()
                    if blob.offset is not None:
                        archive.require_tensor(blob.dtype, blob.shape)
                except Exception as error:  # zipfile raises arbitrary errors for damaged archives
                    yield CorruptFile(self.name, reason_of(error), blob.name)

    def tables_sha256(self) -> str:
        """Return the checksum of all readable archive tables."""
        missing = [blob for blob in self.blobs if blob.start not in self._digests]
        if missing:
            with open_file(self.checkpoint, self.name) as file:
                for blob in missing:
                    try:
                        self._open(file, blob)
                    except Exception:
                        self._digests[blob.start] = b""
        digest = hashlib.sha256()
        for blob in self.blobs:
            digest.update(self._digests[blob.start])
        return digest.hexdigest()

    def _open(self, file: IO[bytes], blob: Blob) -> Archive:
        archive = Archive(file_range(file, blob.start, blob.length))
        rows = repr(archive.rows()).encode()
        self._digests[blob.start] = hashlib.sha256(rows).digest()
        return archive
