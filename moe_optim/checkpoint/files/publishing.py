"""Atomic creation of a folder: it appears complete under its name, or not at all."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from moe_optim.errors import ConfigError, StateError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""``errno`` of a full disk or an exceeded quota."""
_PARTIAL = re.compile(r"\.partial-[0-9a-f]{8}$")


@contextmanager
def published(target: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder beside ``target``; rename it to ``target`` on success.

    A killed process leaves ``<target>.partial-<random>``; an error removes it.

    Raises:
        ConfigError: ``target`` exists.
        StateError: disk has less than ``needed_bytes`` free, or a write failed.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{target}: expected nothing there yet, got a file or folder. Name another."
        )
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed_bytes:
            raise StateError(
                f"{target}: expected {needed_bytes:,} bytes free on its disk, got {free:,}. "
                "Free some space, or name a folder on another disk."
            )
        yield partial
        synchronize(partial)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise StateError(
            f"{target}: expected to write {needed_bytes:,} bytes, got: {error}. "
            f"Nothing is left of it. {_remedy(error)}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tells_of_full_disk(text: str) -> bool:
    """Return whether an error text reports a full disk; not every such error has an ``errno``."""
    return any(os.strerror(number) in text for number in DISK_FULL)


def _remedy(error: Exception) -> str:
    if tells_of_full_disk(str(error)):
        return "Free some space, or name a folder on another disk."
    return "Name another folder."


def is_partial(folder: Path) -> bool:
    """Return whether a folder is named like the remains of a killed :func:`published`."""
    return _PARTIAL.search(folder.name) is not None


def synchronize(folder: Path) -> None:
    """Flush all files to disk, so that a power failure leaves none truncated."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
