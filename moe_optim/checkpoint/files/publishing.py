"""Atomic creation of a folder: it appears complete under its name, or not at all.

Also checks output paths before the work starts.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from moe_optim.errors import ConfigError, StateError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""``errno`` of a full disk or an exceeded quota."""
_PARTIAL = re.compile(r"\.partial-[0-9a-f]{8}$")


def require_writable(
    *paths: Path | None, expected: Literal["a file", "a folder", "a new folder"] = "a file"
) -> None:
    """Refuse output paths that cannot be written, before the work starts; creates nothing.

    Args:
        paths: paths to write; None is skipped. The folder of a file must exist; folders are
            created with their parents, or except for a new one written into.
        expected: kind of output that the paths name.

    Raises:
        ConfigError: something else is there, or a folder is missing or not writable.
    """
    for path in filter(None, paths):
        found = _obstacle(path, expected)
        if found is not None:
            raise ConfigError(
                f"{path}: expected {expected} to write, got {found}. Choose another path."
            )


def _obstacle(path: Path, expected: str) -> str | None:
    is_folder = os.path.isdir(path)  # noqa: PTH112  # pathlib raises in a folder not to be entered
    if is_folder and expected != "a folder":
        return "a folder"
    if os.path.lexists(path) and not is_folder and expected != "a file":
        return "a file"
    folder = path.absolute() if is_folder else path.absolute().parent
    if expected != "a file":
        folder = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not os.path.isdir(folder):  # noqa: PTH112
        return f"no folder {folder}"
    is_writable = os.access(folder, os.W_OK | os.X_OK)
    return None if is_writable else f"no permission to write in {folder}"


@contextmanager
def published(target: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder beside ``target``; rename it to ``target`` on success.

    A killed process leaves ``<target>.partial-<random>``; an error removes it.

    Raises:
        ConfigError: ``target`` exists, or its folder is not writable.
        StateError: disk has less than ``needed_bytes`` free, or a write failed.
    """
    require_writable(target, expected="a new folder")
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
    return "Choose another folder."


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
