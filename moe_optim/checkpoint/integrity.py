"""Integrity checks: the files of a checkpoint are complete and unchanged since the save.

A *quick* check reads metadata and file sizes, a *thorough* one reads everything once. A load
compares checksums of what it reads while it reads it, see :mod:`load_session`. What is found
depends on what was recorded at save time: nothing, a checksum manifest (:mod:`sealing`), or
Megatron's ``integrity.json``; ``docs/checkpoints.md`` has the table.
"""

import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path

from moe_optim.checkpoint.files.archives import Archive, reason_of
from moe_optim.checkpoint.files.folders import (
    COMMON_FILE,
    CONFIG_FILE,
    Checksums,
    CorruptFile,
    DamageError,
    files_of_ranks,
    iteration_folders,
    iteration_of,
    read_checksums,
    sha256_of,
)
from moe_optim.checkpoint.files.metadata import METADATA, Blob, BlobTable, read_blobs, read_metadata
from moe_optim.checkpoint.files.pickles import no_collections
from moe_optim.checkpoint.files.untrusted_files import (
    file_range,
    is_file,
    open_file,
    parse_json,
    read_file,
    size_of,
)
from moe_optim.errors import StateError

_BACKEND = "torch_dist"
_OTHER_BYTES = "does not have the SHA-256 that was recorded"
_LEGACY_MODEL = "model_optim_rng.pt"
OTHER_FILE = "has other checksums than were recorded: it is another file"
"""What is said of a file of another save."""

type Range = tuple[int, int]
"""Start and length in a file, in bytes."""


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
    require_none(check.checkpoint, check.defects(thorough=thorough, part=part, parts=parts))
    return check.blobs


@dataclass(frozen=True)
class Vetted:
    """What one rank read of a checkpoint for all."""

    table: BlobTable
    """Content of ``.metadata``, consistent and without foreign names."""
    identity: str
    """SHA-256 of ``.metadata`` in hexadecimal."""
    checksums: Checksums
    """Content of the checksum manifests."""
    ends: Mapping[str, int | None]
    """Expected size of every file; None: unknown."""


def vet(checkpoint: Path) -> Vetted:
    """Return the metadata of ``checkpoint``, a torch_dist iteration folder; no rank communicates.

    StateError if metadata is missing or damaged. Data files are not opened.
    """
    check = _Check(Path(checkpoint))
    require_none(check.checkpoint, check.metadata_defects())
    with no_collections():
        table = BlobTable(check.blobs)
    return Vetted(table, check.small[METADATA], check.checksums, check.ends)


def size_defects(checkpoint: Path, ends: Mapping[str, int | None]) -> Iterator[CorruptFile]:
    """Yield the files of ``checkpoint`` that are missing or have another size than in ``ends``."""
    for name, end in ends.items():
        try:
            what = _size_defect(checkpoint, name, end)
        except FileNotFoundError:
            what = "is missing"
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
        if what is not None:
            yield CorruptFile(name, what)


def _size_defect(checkpoint: Path, name: str, end: int | None) -> str | None:
    with open_file(checkpoint, name) as file:
        size = os.fstat(file.fileno()).st_size
        if end is not None and size != end:
            return f"is {'cut off' if size < end else 'too long'}: {size} of {end} bytes"
        if end is not None and name.endswith(".pt"):
            try:
                Archive(file)
            except Exception as error:  # zipfile raises arbitrary errors for damaged archives
                return reason_of(error)
    return None


def require_none(checkpoint: Path, defects: Iterable[CorruptFile]) -> None:
    """Raise StateError for ``defects`` of ``checkpoint``, naming another one to load."""
    lines = []
    for _, of_file in groupby(defects, attrgetter("file")):
        first, *more = of_file
        lines.append(f"{first}, and {len(more)} more in it" if more else str(first))
    if lines:
        raise StateError(
            f"{checkpoint}: expected every file as it was saved, got: {'; '.join(lines)}. "
            f"{_what_to_load(checkpoint)}"
        )


def archives_of(
    checkpoint: Path, *, is_finished: bool = True
) -> tuple[dict[str, str], dict[str, list[Range]]]:
    """Return what a checksum manifest records; no rank communicates.

    Args:
        checkpoint: folder of one iteration.
        is_finished: False if ``metadata.json`` is to be written later.

    Returns:
        SHA-256 of each metadata file, and start and length of each archive in a data file.

    Raises:
        StateError: files are missing or incomplete.
    """
    check = _Check(checkpoint, is_finished=is_finished)
    require_none(check.checkpoint, check.defects())
    ranges = {
        name: [(blob.start, blob.length) for blob in blobs]
        for name, blobs in check.archives.items()
    }
    return check.small, ranges


def table_checksums(checkpoint: Path, name: str, ranges: list[Range]) -> str:
    """Return the checksums of archive tables, as ``Checksums.archives`` has them.

    Args:
        checkpoint: folder of one iteration.
        name: file in it.
        ranges: start and length of each archive in bytes.

    Raises:
        StateError: an archive is damaged.
    """
    with open_file(checkpoint, name) as file:
        try:
            return "".join(Archive(file_range(file, *one)).table_checksum() for one in ranges)
        except zipfile.BadZipFile as error:
            raise StateError(
                f"{checkpoint / name}: expected archives that torch.save writes, got {error}. Save "
                "the checkpoint again."
            ) from None


def _what_to_load(checkpoint: Path) -> str:
    for other in iteration_folders(checkpoint.parent):
        if other.name != checkpoint.name and checkpoint_defect(other) is None:
            iteration = iteration_of(other)
            return f"Load {other.name} beside it, which is complete: --ckpt-step {iteration}."
    return "No other checkpoint beside it is complete: restore its files from a copy."


class _Check:
    def __init__(self, checkpoint: Path, *, is_finished: bool = True) -> None:
        self.checkpoint, self._is_finished = checkpoint, is_finished
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
        for defect in self.metadata_defects():
            yield defect
            return
        for defect in size_defects(self.checkpoint, self.ends):
            yield defect
            self.archives.pop(defect.file, None)
        if thorough:
            yield from self._corrupt_files(part, parts)

    def metadata_defects(self) -> Iterator[CorruptFile]:
        """Read all but data; yield the defect that prevents it."""
        path = self.checkpoint
        try:
            if not path.is_dir():
                what = "is a file, expected a folder" if path.exists() else "does not exist"
                raise DamageError("", f"{path.name} {what}")
            self.checksums = read_checksums(path)
            self.archives = self._read_archives()
            for name, digests in self.checksums.archives.items():
                if name in self.archives and len(digests) != 8 * len(self.archives[name]):
                    raise DamageError(name, "has another number of archives than was recorded")
            if self.checksums.archives or self.checksums.tables:
                for name in sorted(self.archives.keys() - self.checksums.files):
                    raise DamageError(name, "was not there when the checksums were recorded")
        except DamageError as error:
            yield error.corrupt
        except OSError as error:
            yield CorruptFile(Path(error.filename or "").name, f"cannot be read: {error.strerror}")

    @property
    def ends(self) -> dict[str, int | None]:
        """Expected size of every file but metadata."""
        listed = sorted(self.checksums.files - self.archives.keys() - self.small.keys())
        ends: dict[str, int | None] = dict.fromkeys(listed)
        return ends | {name: blobs[-1].end for name, blobs in self.archives.items()}

    def _read_archives(self) -> dict[str, list[Blob]]:
        path = self.checkpoint
        if legacy := files_of_ranks(path):
            for folder in sorted({file.parent.name for file in legacy}):
                if not is_file(path, model := f"{folder}/{_LEGACY_MODEL}"):
                    raise DamageError(model, "is missing")
            names = [str(file.relative_to(path)) for file in legacy]
            return {name: self._whole_file(name) for name in names}
        if self._is_finished:
            try:
                backend = parse_json(self._read_small(CONFIG_FILE))["sharded_backend"]
            except (ValueError, KeyError, TypeError) as error:
                raise DamageError(CONFIG_FILE, f"is cut off or damaged: {error}") from error
            if backend != _BACKEND:
                named = repr(backend)[:40] if isinstance(backend, str) else "none"
                what = f"names the backend {named}, expected {_BACKEND!r}"
                raise DamageError(CONFIG_FILE, what)
        self.blobs = read_blobs(self._read_small(METADATA))
        archives = {name: list(group) for name, group in groupby(self.blobs, itemgetter(0))}
        has_common = any([blob.key.startswith("common_state") for blob in self.blobs])
        if os.path.lexists(path / COMMON_FILE):  # Megatron prefers it, and follows links
            if has_common:
                what = f"is of another save, as {METADATA} names a common state: remove it"
                raise DamageError(COMMON_FILE, what)
            archives[COMMON_FILE] = self._whole_file(COMMON_FILE)
        elif not has_common:
            raise DamageError(METADATA, f"names no common state, and there is no {COMMON_FILE}")
        return archives

    def _whole_file(self, name: str) -> list[Blob]:
        return [Blob(name, 0, size_of(self.checkpoint, name), key="", offset=None)]

    def _read_small(self, name: str) -> bytes:
        path = self.checkpoint
        try:
            content = read_metadata(path) if name == METADATA else read_file(path, name)
        except FileNotFoundError as error:
            if name == CONFIG_FILE:
                raise DamageError("", f"no {CONFIG_FILE}: it was not saved to the end") from error
            raise DamageError(name, "is missing") from error
        except OSError as error:
            raise DamageError(name, f"cannot be read: {error.strerror}") from error
        self.small[name] = hashlib.sha256(content).hexdigest()
        if self.checksums.whole.get(name) not in (None, self.small[name]):
            raise DamageError(name, _OTHER_BYTES)
        return content

    def _corrupt_files(self, part: int, parts: int) -> Iterator[CorruptFile]:
        """Yield the defects in one share of the bytes; shares have about equal size."""
        total = max(1, sum(blobs[-1].end for blobs in self.archives.values()))
        before = 0
        for name, blobs in self.archives.items():
            ours = [blob for blob in blobs if (before + blob.start) * parts // total == part]
            before += blobs[-1].end
            try:
                if ours:
                    yield from self._corrupt_parts(name, ours)
            except OSError as error:
                yield CorruptFile(name, f"cannot be read: {error.strerror}")

    def _corrupt_parts(self, name: str, ours: list[Blob]) -> list[CorruptFile]:
        """Return the defects in our share of a file; the first share checks the whole file, too."""
        blobs, recorded = self.archives[name], self.checksums.whole.get(name)
        owns_file = ours[0] is blobs[0]
        if recorded is None:
            corrupt = self._corrupt_archives(name, ours)
        elif owns_file and sha256_of(self.checkpoint, name) != recorded:
            corrupt = self._corrupt_archives(name, blobs) or [CorruptFile(name, _OTHER_BYTES)]
        else:
            corrupt = []
        tables = self.checksums.tables.get(name)
        if not owns_file or corrupt or tables is None or tables == self._digest_tables(name):
            return corrupt
        return [CorruptFile(name, OTHER_FILE)]

    def _corrupt_archives(self, name: str, blobs: Iterable[Blob]) -> list[CorruptFile]:
        digests, corrupt = self.checksums.archives.get(name, ""), []
        numbers = {blob.start: at for at, blob in enumerate(self.archives[name]) if digests}
        with open_file(self.checkpoint, name) as file:
            for blob in blobs:
                try:
                    archive = Archive(file_range(file, blob.start, blob.length))
                    archive.compare_checksums()
                    if blob.offset is not None:
                        archive.require_tensor(blob.dtype, blob.shape)
                    at = 8 * numbers.get(blob.start, 0)
                    if digests and digests[at : at + 8] != archive.table_checksum():
                        corrupt.append(CorruptFile(name, OTHER_FILE, blob.name))
                except Exception as error:  # zipfile raises arbitrary errors for damaged archives
                    corrupt.append(CorruptFile(name, reason_of(error), blob.name))
        return corrupt

    def _digest_tables(self, name: str) -> str:
        """Return the SHA-256 of all archive tables, as older versions recorded it."""
        digest = hashlib.sha256()
        with open_file(self.checkpoint, name) as file:
            for blob in self.archives[name]:
                with suppress(Exception):  # a damaged one is named by who checks it
                    archive = Archive(file_range(file, blob.start, blob.length))
                    digest.update(hashlib.sha256(archive.rows()).digest())
        return digest.hexdigest()
