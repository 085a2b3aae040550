"""Writes files atomically and explains a full disk."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe_optim.checkpoint.files.publishing import DISK_FULL

STDOUT = Path("-")
"""Path that stands for stdout."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; after a crash or a full disk the old file remains.

    Of processes that call it at once, the last one's content remains.
    """
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with full_disk_explained(path, f"writing {path.name}"), partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def full_disk_explained(path: Path, doing: str) -> Iterator[None]:
    """Add the file system and the remedy to an ``OSError`` about a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        sentence = (
            f"{path}: {doing} failed: the disk is full ({free_bytes(path) / 2**20:.1f} MiB free). "
            "Free some space, or give a folder on another disk with --out."
        )
        raise OSError(error.errno, sentence) from error


def free_bytes(path: Path) -> int:
    """Return the bytes free on the file system of ``path`` or its nearest existing parent."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free
