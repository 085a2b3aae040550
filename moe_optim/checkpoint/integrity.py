"""Whether the files of a checkpoint are all there, and still hold what was saved.

Two depths: *quick* reads metadata and the sizes of files, *thorough* reads everything once. What
they find depends on what was recorded of the checkpoint when it was saved:

- Nothing. Every key, byte range, shape and dtype of ``.metadata`` has to fit the others and the
  sizes of files; thorough compares the bytes of every record with its CRC-32, and every tensor's
  archive with its shape and dtype in ``.metadata``. Not found: a file that was replaced by one
  of another checkpoint with the same layout, and a key of ``.metadata`` under another name, which
  is missing when it is asked for.
- A seal (:func:`seal`). Quick also compares ``.metadata`` and ``metadata.json``, thorough the CRCs
  themselves: both of the above are found.
- Megatron's ``integrity.json`` (``--verify-integrity``). As with a seal, and thorough compares a
  SHA-256 of every file that is loaded.

Without the last, bits that nothing reads may change unseen, such as time stamps in archives. That a
file or a whole ``mp_rank_*`` folder of ``--ckpt-format torch`` is missing is found by a seal alone,
and that its save was killed by the seal that it begins with.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, cast

from moe_optim.checkpoint.files.archives import contents_defect, table_defect, table_digest
from moe_optim.checkpoint.files.bounded_json import parse_json
from moe_optim.checkpoint.files.byte_ranges import FileRange
from moe_optim.checkpoint.files.folders import files_of_ranks, iteration_folders, iteration_of
from moe_optim.checkpoint.files.records import (
    MANIFEST,
    SEAL,
    CorruptFile,
    DamageError,
    Records,
    read_records,
    remove_record,
    sha256_of,
    write_seal,
    write_unfinished_seal,
)
from moe_optim.checkpoint.files.regular_files import is_file, open_file, read_file, size_of
from moe_optim.checkpoint.files.stored_metadata import METADATA, Blob, read_blobs, read_metadata
from moe_optim.checkpoint.files.stored_tensors import tensor_defect
from moe_optim.errors import StateError

_CONFIG = "metadata.json"
_BACKEND = "torch_dist"
_COMMON = "common.pt"  # in torch_dist checkpoints of older Megatrons
_LEGACY_MODEL = "model_optim_rng.pt"

_DAMAGED = "expected every file as it was saved"
_REMEDY = re.compile(rf"{_DAMAGED}.* --ckpt-step (\d+)\.")

Archives = dict[str, list[Blob]]
"""By name of a file, the archives in it, from its start to its end."""


def checkpoint_defect(checkpoint: Path) -> str | None:
    """Say why a checkpoint cannot be loaded, or None when it is complete: the quick check.

    Complete means for torch_dist: Megatron's ``metadata.json``, written when all ranks are done;
    torch's ``.metadata``; every file that it names, as long as it says; and the state that is not
    sharded. For ``--ckpt-format torch``: a model in every ``mp_rank_*`` folder, and no file cut
    off. What was recorded of metadata has to hold, see the module. No rank communicates.

    Args:
        checkpoint: folder of one iteration.
    """
    return next((str(defect) for defect in _look(Path(checkpoint), thorough=False)), None)


def corrupt_files(checkpoint: Path, *, part: int = 0, parts: int = 1) -> Iterator[CorruptFile]:
    """Yield everything that is wrong with a checkpoint: the thorough check.

    Memory stays below some ``archives.BLOCK_BYTES``, beside ``.metadata``.

    Args:
        checkpoint: folder of one iteration.
        part: which share of the bytes to read, for ranks that check together; each of them does
            the quick check.
        parts: number of shares.
    """
    return _look(Path(checkpoint), thorough=True, part=part, parts=parts)


def require_intact(checkpoint: Path, *, thorough: bool, part: int = 0, parts: int = 1) -> None:
    """Refuse a checkpoint with a missing or damaged file.

    Every rank may call it by itself. Ranks that share the reading each see their share, as with
    :func:`corrupt_files`: they have to exchange the outcome before they go on.

    Args:
        checkpoint: folder of one iteration.
        thorough: read everything, and not metadata and sizes alone.
        part: which share of the bytes to read.
        parts: number of shares.

    Raises:
        StateError: names every defective file, and the newest complete checkpoint beside it.
    """
    checkpoint = Path(checkpoint)
    lines = []
    defects = _look(checkpoint, thorough, part, parts)
    for _, of_file in groupby(defects, key=lambda defect: defect.file):
        first, *more = of_file
        lines.append(f"{first}, and {len(more)} more in it" if more else str(first))
    if lines:
        raise StateError(
            f"{checkpoint}: {_DAMAGED}, got: {'; '.join(lines)}. {_what_to_load(checkpoint)}"
        )


def is_damage(message: str) -> bool:
    """Return whether ``message``, perhaps of another process, is :func:`require_intact`'s."""
    return _DAMAGED in message


def step_beside(message: str) -> int | None:
    """Return the iteration that a ``message`` of :func:`require_intact` says to load, if any."""
    found = _REMEDY.search(message)
    return int(found[1]) if found else None


def seal(checkpoint: Path) -> None:
    """Record what a complete checkpoint holds. One process calls it, when all ranks have written.

    Recorded are a SHA-256 of each metadata file, and one of the tables of all archives in each
    other file: names, places and CRCs of their records. Data is not read again.

    Args:
        checkpoint: folder of one iteration; the seal is written into it.

    Raises:
        StateError: the checkpoint is not complete, or no seal can be written there.
    """
    checkpoint = Path(checkpoint)
    remove_record(checkpoint, SEAL)
    require_intact(checkpoint, thorough=False)
    small = [name for name in (METADATA, _CONFIG) if is_file(checkpoint, name)]
    tables = {
        name: _tables_sha256(checkpoint, name, blobs)
        for name, blobs in _archives(checkpoint, Records()).items()
    }
    whole = {name: sha256_of(checkpoint, name) for name in small}
    write_seal(checkpoint, Records(whole, tables))


def invalidate(checkpoint: Path) -> None:
    """Have a torch_dist checkpoint count as incomplete from now on, since it is written over.

    Megatron saves an iteration again into its old folder, and until it is done ``metadata.json``
    of the first save says that all is there. One process calls this before any rank writes.

    Args:
        checkpoint: folder of one iteration; what was recorded of it is removed.

    Raises:
        StateError: a record cannot be removed.
    """
    for name in (_CONFIG, MANIFEST, SEAL):  # the first decides
        remove_record(Path(checkpoint), name)


def begin(checkpoint: Path) -> None:
    """Have a checkpoint of ``--ckpt-format torch`` count as incomplete until it is sealed.

    One process calls this before any rank writes: files of ranks do not say whether those of other
    ranks are there, and belong to the same save.

    Args:
        checkpoint: folder of one iteration; made if it is not there.

    Raises:
        StateError: something else is where the seal belongs.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_unfinished_seal(checkpoint)


def _what_to_load(checkpoint: Path) -> str:
    for other in iteration_folders(checkpoint.parent):
        if other.name != checkpoint.name and checkpoint_defect(other) is None:
            iteration = iteration_of(other)
            return f"Load {other.name} beside it, which is complete: --ckpt-step {iteration}."
    return "No other checkpoint beside it is complete: restore its files from a copy."


def _look(checkpoint: Path, thorough: bool, part: int = 0, parts: int = 1) -> Iterator[CorruptFile]:
    """Yield what is wrong, and at last what kept more from being looked for."""
    try:
        if not checkpoint.is_dir():
            what = "is a file, expected a folder" if checkpoint.exists() else "does not exist"
            raise DamageError("", f"{checkpoint.name} {what}")
        records = read_records(checkpoint)
        archives = _archives(checkpoint, records)
        missing_or_cut = list(_size_defects(checkpoint, records, archives))
        yield from missing_or_cut
        if thorough:
            for defect in missing_or_cut:
                archives.pop(defect.file, None)
            yield from _thorough(checkpoint, records, archives, part, parts)
    except DamageError as error:
        yield error.corrupt
    except OSError as error:
        yield CorruptFile(Path(error.filename or "").name, f"cannot be read: {error.strerror}")


def _size_defects(checkpoint: Path, records: Records, archives: Archives) -> Iterator[CorruptFile]:
    """Yield what metadata and sizes show to be wrong."""
    ends = dict.fromkeys(sorted(records.files - archives.keys()))
    for name, end in {**ends, **{name: blobs[-1].end for name, blobs in archives.items()}}.items():
        try:
            what = _size_defect(checkpoint, name, end)
        except FileNotFoundError:
            what = "is missing"
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
        if what is not None:
            yield CorruptFile(name, what)


def _size_defect(checkpoint: Path, name: str, expected: int | None) -> str | None:
    """Say what is wrong with a file of which the end is known, or nothing at all."""
    with open_file(checkpoint, name) as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected:
            return f"is {'cut off' if size < expected else 'too long'}: {size} of {expected} bytes"
        return table_defect(file) if expected is not None and name.endswith(".pt") else None


def _archives(checkpoint: Path, records: Records) -> Archives:
    """Return the archives that a checkpoint consists of; DamageError for damaged metadata."""
    if legacy := files_of_ranks(checkpoint):
        return _legacy_archives(checkpoint, legacy)
    _require_backend(_read_small(checkpoint, _CONFIG, records))
    blobs = read_blobs(_read_small(checkpoint, METADATA, records))
    archives = {name: list(group) for name, group in groupby(blobs, lambda blob: blob.file)}
    if is_file(checkpoint, _COMMON):
        archives[_COMMON] = [_whole_file(checkpoint, _COMMON)]
    elif not any(blob.key.startswith("common_state") for blob in blobs):
        raise DamageError(METADATA, "names no common state, and there is no common.pt")
    return archives


def _legacy_archives(checkpoint: Path, paths: list[Path]) -> Archives:
    for folder in sorted({path.parent.name for path in paths}):
        if not is_file(checkpoint, model := f"{folder}/{_LEGACY_MODEL}"):
            raise DamageError(model, "is missing")
    names = [str(path.relative_to(checkpoint)) for path in paths]
    return {name: [_whole_file(checkpoint, name)] for name in names}


def _whole_file(checkpoint: Path, name: str) -> Blob:
    return Blob(name, 0, size_of(checkpoint, name), key="", offset=None)


def _read_small(checkpoint: Path, name: str, records: Records) -> bytes:
    try:
        content = read_metadata(checkpoint) if name == METADATA else read_file(checkpoint, name)
    except FileNotFoundError as error:
        if name == _CONFIG:
            raise DamageError("", f"no {_CONFIG}: it was not saved to the end") from error
        raise DamageError(name, "is missing") from error
    except OSError as error:
        raise DamageError(name, f"cannot be read: {error.strerror}") from error
    if records.whole.get(name) not in (None, hashlib.sha256(content).hexdigest()):
        raise DamageError(name, "does not have the SHA-256 that was recorded")
    return content


def _require_backend(config: bytes) -> None:
    try:
        backend = parse_json(config)["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(_CONFIG, f"is cut off or damaged: {error}") from error
    if backend != _BACKEND:
        named = repr(backend)[:40] if isinstance(backend, str) else "none"
        raise DamageError(_CONFIG, f"names the backend {named}, expected {_BACKEND!r}")


def _thorough(
    checkpoint: Path, records: Records, archives: Archives, part: int, parts: int
) -> Iterator[CorruptFile]:
    """Yield what the bytes of one share show to be wrong; shares are about equal in bytes."""
    total = max(1, sum(blobs[-1].end for blobs in archives.values()))
    before = 0
    for name, blobs in archives.items():
        ours = [blob for blob in blobs if (before + blob.start) * parts // total == part]
        before += blobs[-1].end
        if not ours:
            continue
        try:
            yield from _corrupt_parts(checkpoint, name, blobs, ours, records)
        except OSError as error:
            yield CorruptFile(name, f"cannot be read: {error.strerror}")


def _corrupt_parts(
    checkpoint: Path, name: str, blobs: list[Blob], ours: list[Blob], records: Records
) -> Iterator[CorruptFile]:
    """Yield what is wrong with our share of a file; who has its first blob looks at the whole."""
    owns_file, recorded = ours[0] is blobs[0], records.whole.get(name)
    if recorded is None:
        corrupt = list(_corrupt_blobs(checkpoint, name, ours))
    elif owns_file and sha256_of(checkpoint, name) != recorded:
        unknown = [CorruptFile(name, "does not have the SHA-256 that was recorded")]
        corrupt = list(_corrupt_blobs(checkpoint, name, blobs)) or unknown
    else:
        corrupt = []
    sealed = records.tables.get(name)
    is_checked = owns_file and not corrupt and sealed is not None
    if is_checked and _tables_sha256(checkpoint, name, blobs) != sealed:
        corrupt = [CorruptFile(name, "has other checksums than were sealed: it is another file")]
    yield from corrupt


def _corrupt_blobs(checkpoint: Path, name: str, blobs: list[Blob]) -> Iterator[CorruptFile]:
    with open_file(checkpoint, name) as file:
        for blob in blobs:
            archive = _archive(file, blob)
            what = contents_defect(archive)
            if what is None and blob.offset is not None:
                what = tensor_defect(archive, blob.dtype, blob.shape)
            if what is not None:
                yield CorruptFile(name, what, blob.name)


def _tables_sha256(checkpoint: Path, name: str, blobs: list[Blob]) -> str:
    digest = hashlib.sha256()
    with open_file(checkpoint, name) as file:
        for blob in blobs:
            digest.update(table_digest(_archive(file, blob)))
    return digest.hexdigest()


def _archive(file: IO[bytes], blob: Blob) -> IO[bytes]:
    return cast(IO[bytes], FileRange(file, blob.start, blob.length))
