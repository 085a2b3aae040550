"""Checksums of a checkpoint that were written beside it: our seal, and Megatron's manifest."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from moe_optim.checkpoint.files.bounded_json import parse_json
from moe_optim.checkpoint.files.regular_files import open_file, read_file
from moe_optim.errors import StateError

SEAL = "moe_optim.seal.json"
MANIFEST = "integrity.json"
"""Written by Megatron with ``--verify-integrity``; as the seal, of whole files alone."""

_ALGORITHM = "sha256"
_UNFINISHED = "unfinished"


@dataclass(frozen=True)
class CorruptFile:
    """One thing that is wrong with one file of a checkpoint."""

    file: str
    """Its name within the folder; empty for the folder itself."""
    what: str
    key: str = ""
    """Of the tensor or object that is damaged, where that is known."""

    def __str__(self) -> str:
        name = f"{self.file} ({self.key})" if self.key else self.file
        text = f"{name} {self.what}".lstrip()
        return text if text.isprintable() else repr(text)


class DamageError(StateError):
    """Something is wrong with a file that all else depends on."""

    def __init__(self, file: str, what: str, key: str = "") -> None:
        self.corrupt = CorruptFile(file, what, key)
        super().__init__(str(self.corrupt))


@dataclass(frozen=True)
class Records:
    """What was recorded of a checkpoint: by name of the file, a SHA-256 in hexadecimal."""

    whole: Mapping[str, str] = field(default_factory=dict)
    """Of all bytes of a file."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Of the tables of the archives in a file, see ``checkpoints.pickles.archives``."""

    @property
    def files(self) -> set[str]:
        """Return the names of all files that were there."""
        return {*self.whole, *self.tables}


def read_records(checkpoint: Path) -> Records:
    """Return what the seal and Megatron's manifest say; DamageError for one that cannot be read."""
    sealed = _read(checkpoint, SEAL, ("whole", "tables"))
    listed = _read(checkpoint, MANIFEST, ("files",))
    return Records(whole=sealed["whole"] | listed["files"], tables=sealed["tables"])


def remove_record(checkpoint: Path, name: str) -> None:
    """Remove a file or link of a checkpoint, if it is there; StateError for something else."""
    try:
        (checkpoint / name).unlink(missing_ok=True)
    except OSError as error:
        raise StateError(
            f"{checkpoint / name}: expected a file to write anew, got: {error.strerror}. Remove it."
        ) from error


def write_seal(checkpoint: Path, records: Records) -> None:
    """Write the seal, whole or not at all; StateError where something else is in its place."""
    content = {"algorithm": _ALGORITHM, "whole": records.whole, "tables": records.tables}
    _replace_seal(checkpoint, content)


def write_unfinished_seal(checkpoint: Path) -> None:
    """Have the seal say that the checkpoint is being written; raises as :func:`write_seal`."""
    _replace_seal(checkpoint, {_UNFINISHED: True})


def _replace_seal(checkpoint: Path, content: dict[str, Any]) -> None:
    partial = checkpoint / f".{SEAL}.partial"
    remove_record(checkpoint, partial.name)  # it may be a link to another file
    with partial.open("x") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(checkpoint / SEAL)


def sha256_of(checkpoint: Path, name: str) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in blocks."""
    with open_file(checkpoint, name) as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def _read(checkpoint: Path, name: str, sections: Iterable[str]) -> dict[str, dict[str, str]]:
    try:
        content: Any = parse_json(read_file(checkpoint, name))
    except FileNotFoundError:
        return {section: {} for section in sections}
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise DamageError(name, f"cannot be read: {said}") from error
    if content == {_UNFINISHED: True}:
        raise DamageError("", "it was not saved to the end")
    try:
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"expected the algorithm {_ALGORITHM!r}, got another")
        return {section: _checksums(content[section]) for section in sections}
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(name, f"is damaged: {error}") from error


def _checksums(section: Any) -> dict[str, str]:
    """Return a section whose keys are files of the checkpoint, and whose values are text."""
    for name, digest in {**section}.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name.isprintable():
            raise ValueError(f"{name[:40]!r} is no file of the checkpoint")
        if not isinstance(digest, str):
            raise TypeError(f"expected a checksum of {name[:40]!r}, got none")
    return dict(section)
