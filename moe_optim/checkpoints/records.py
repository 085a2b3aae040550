"""Checksums of a checkpoint that were written beside it: our seal, and Megatron's manifest."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_optim.errors import StateError

SEAL = "moe_optim.seal.json"
MANIFEST = "integrity.json"
"""Written by Megatron with ``--verify-integrity``; as the seal, of whole files alone."""

_ALGORITHM = "sha256"
_BLOCK_BYTES = 4 * 2**20


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
        return f"{name} {self.what}".lstrip()


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
    """Of the tables of the archives in a file, see :func:`moe_optim.checkpoints.archives`."""

    @property
    def files(self) -> set[str]:
        """Return the names of all files that were there."""
        return {*self.whole, *self.tables}


def read_records(checkpoint: Path) -> Records:
    """Return what the seal and Megatron's manifest say; empty where there is neither.

    Raises:
        DamageError: one of them is there and cannot be read.
    """
    sealed = _read(checkpoint, SEAL, ("whole", "tables"))
    listed = _read(checkpoint, MANIFEST, ("files",))
    return Records(whole=sealed["whole"] | listed["files"], tables=sealed["tables"])


def write_seal(checkpoint: Path, records: Records) -> None:
    """Write the seal, whole or not at all."""
    content = {"algorithm": _ALGORITHM, "whole": records.whole, "tables": records.tables}
    partial = checkpoint / f".{SEAL}.partial"
    with partial.open("w") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(checkpoint / SEAL)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read(checkpoint: Path, name: str, sections: Iterable[str]) -> dict[str, dict[str, str]]:
    try:
        content: Any = json.loads((checkpoint / name).read_bytes())
    except FileNotFoundError:
        return {section: {} for section in sections}
    except (OSError, ValueError) as error:
        raise DamageError(name, f"cannot be read: {error}") from error
    try:
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"algorithm {content['algorithm']!r}")
        return {section: {**content[section]} for section in sections}
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(name, f"is damaged: {error}") from error
