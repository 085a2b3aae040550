"""Names of Megatron's checkpoint folders and files, and checksum manifests in them."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from moe_optim.checkpoint.files.untrusted_files import open_file, parse_json, read_file
from moe_optim.errors import StateError

CONFIG_FILE = "metadata.json"
"""File in which Megatron records the format of a checkpoint."""
COMMON_FILE = "common.pt"
"""File in which older Megatrons keep the common state; newer ones prefer it to their own."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron records the iteration to load."""
CHECKSUM_MANIFEST = "moe_optim.seal.json"
"""File name of this package's checksum manifest."""
MEGATRONS_MANIFEST = "integrity.json"
"""File name of Megatron's ``--verify-integrity`` manifest, with checksums of whole files only."""

_TRACKER_BYTES = 4096
_ITERATION_FOLDER = re.compile(r"iter_[0-9]{7,18}")
_ALGORITHM = "sha256"
_UNFINISHED = "unfinished"


def is_local(checkpoint_dir: str | Path) -> bool:
    """Return whether files can be opened here; only Megatron reads ``msc://`` and similar URLs."""
    return "://" not in str(checkpoint_dir)


def iteration_folders(checkpoints: Path) -> list[Path]:
    """Return the ``iter_*`` folders, newest first."""
    found = [path for path in checkpoints.glob("iter_*") if _ITERATION_FOLDER.fullmatch(path.name)]
    return sorted(found, key=iteration_of, reverse=True)


def iteration_of(checkpoint: Path) -> int:
    """Return the iteration number of a checkpoint folder such as ``iter_0000120``."""
    return int(checkpoint.name.removeprefix("iter_"))


def read_tracker(checkpoints: Path) -> str | None:
    """Return the text of the tracker file, None without one; raises like :func:`read_file`."""
    try:
        content = read_file(checkpoints, TRACKER, _TRACKER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content.decode(errors="replace").strip()


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face checkpoint, and none of Megatron's."""
    is_megatron = (folder / TRACKER).exists()
    has_model = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
    return has_model and not is_megatron


def files_of_ranks(checkpoint: Path) -> list[Path]:
    """Return all per-rank files of ``--ckpt-format torch``; empty for other formats."""
    is_torch_dist = any([(checkpoint / name).exists() for name in (CONFIG_FILE, ".metadata")])
    return [] if is_torch_dist else sorted(checkpoint.glob("mp_rank_*/*.pt"))


@dataclass(frozen=True)
class CorruptFile:
    """A defect of a file in a checkpoint."""

    file: str
    """Name within the folder; empty for the folder itself."""
    what: str
    key: str = ""
    """Key of the damaged tensor or object, if known."""

    def __str__(self) -> str:
        name = f"{self.file} ({self.key})" if self.key else self.file
        text = f"{name} {self.what}".lstrip()
        return text if text.isprintable() else repr(text)


class DamageError(StateError):
    """A file that all others depend on is damaged."""

    def __init__(self, file: str, what: str) -> None:
        self.corrupt = CorruptFile(file, what)
        super().__init__(str(self.corrupt))


@dataclass(frozen=True)
class Checksums:
    """Checksums in hexadecimal by file name."""

    whole: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of whole files."""
    archives: Mapping[str, str] = field(default_factory=dict)
    """``Archive.table_checksum`` of each archive in a file, in file order, one after the other."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of all archive tables in a file, as older versions of this package recorded it."""

    @property
    def files(self) -> set[str]:
        """Names of all recorded files."""
        return {*self.whole, *self.archives, *self.tables}


def read_checksums(checkpoint: Path) -> Checksums:
    """Return the content of both manifests; DamageError for an unreadable one."""
    own = _read_manifest(checkpoint, CHECKSUM_MANIFEST, ("whole",), ("archives", "tables"))
    megatrons = _read_manifest(checkpoint, MEGATRONS_MANIFEST, ("files",))
    return Checksums(own["whole"] | megatrons["files"], own["archives"], own["tables"])


def remove_record(checkpoint: Path, name: str) -> None:
    """Remove a file or link of a checkpoint if it exists; StateError for anything else."""
    try:
        (checkpoint / name).unlink(missing_ok=True)
    except OSError as error:
        raise StateError(
            f"{checkpoint / name}: expected a file that can be replaced, got: {error.strerror}. "
            "Remove it."
        ) from error


def write_checksums(checkpoint: Path, checksums: Checksums | None) -> None:
    """Write the checksum manifest atomically; None marks the checkpoint unfinished.

    StateError if the manifest's name is taken by another object.
    """
    content: dict[str, Any] = {_UNFINISHED: True}
    if checksums is not None:
        content = {"algorithm": _ALGORITHM, "whole": checksums.whole}
        content["archives"] = checksums.archives
    partial = checkpoint / f".{CHECKSUM_MANIFEST}.partial"
    remove_record(checkpoint, partial.name)  # may be a link to another file
    with partial.open("x") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(checkpoint / CHECKSUM_MANIFEST)


def sha256_of(checkpoint: Path, name: str) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in blocks."""
    with open_file(checkpoint, name) as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def _read_manifest(
    checkpoint: Path, name: str, sections: Iterable[str], any_of: Iterable[str] = ()
) -> dict[str, dict[str, str]]:
    """Return sections of a manifest, all empty without one; it has one of ``any_of``."""
    try:
        content: Any = parse_json(read_file(checkpoint, name))
    except FileNotFoundError:
        return {section: {} for section in (*sections, *any_of)}
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise DamageError(name, f"cannot be read: {said}") from error
    if content == {_UNFINISHED: True}:
        raise DamageError("", "it was not saved to the end")
    try:
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"expected the algorithm {_ALGORITHM!r}, got another")
        optional = {section: content[section] for section in any_of if section in content}
        if any_of and not optional:
            raise KeyError(next(iter(any_of)))
        found = {section: content[section] for section in sections} | optional
        return dict.fromkeys(any_of, {}) | {
            section: _checksums_of(held) for section, held in found.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(name, f"is damaged: {error}") from error


def _checksums_of(section: Any) -> dict[str, str]:
    for file, digest in {**section}.items():
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not file.isprintable():
            raise ValueError(f"{file[:40]!r} is not a file of the checkpoint")
        if not isinstance(digest, str):
            raise TypeError(f"expected a checksum of {file[:40]!r}, got none")
    return dict(section)
