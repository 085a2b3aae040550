"""The one place that opens a file of a checkpoint.

A checkpoint may come from anywhere. A name in it may lead out of its folder, through ``..`` or a
link, or to what is no file: a pipe that nobody writes to, a device without an end. And its size may
be more than there is memory for, whatever little of it the disk holds.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

SMALL_BYTES = 16 * 2**20
"""More than files have that are read whole: records, descriptions. As Python objects, JSON and
pickles take up to 64 times their bytes."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def locate(folder: Path, name: str) -> Path:
    """Return where a file of a checkpoint lies, without links.

    ``folder`` may be a link itself. Links within it are followed, and those of a cache of Hugging
    Face, from ``snapshots/<revision>`` to ``blobs`` beside ``snapshots``.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: it leads out of the folder, or is no regular file. ``strerror`` says which.
    """
    return Path(_locate(folder, name))


def _locate(folder: Path, name: str) -> str:
    # text, not Path: it is asked for once a tensor
    try:
        root = os.path.realpath(folder, strict=True)
        path = os.path.realpath(os.path.join(root, name), strict=True)  # noqa: PTH118
    except ValueError as error:  # zero bytes, or what no file system spells
        raise _refusal("it is no name of a file", folder) from error
    above, parent = os.path.split(os.path.dirname(root))  # noqa: PTH120, PTH206
    inside = [root, f"{above}/blobs"] if parent == "snapshots" else [root]
    if not f"{path}/".startswith(tuple(f"{each}/" for each in inside)):
        raise _refusal("it leads out of the checkpoint", folder / name)
    _require_regular(os.stat(path), folder / name)  # noqa: PTH116
    return path


def open_file(folder: Path, name: str) -> BufferedReader:
    """Open a file of a checkpoint for reading; raises as :func:`locate` does."""
    # should a link or a pipe have come to lie there meanwhile, it is not followed or waited for
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(_locate(folder, name), flags)
    try:
        _require_regular(os.fstat(descriptor), folder / name)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def given_file(path: Path) -> Path:
    """Return a path that the user gave, wherever links lead; OSError for no regular file."""
    _require_regular(path.stat(), path)
    return path


def read_file(folder: Path, name: str, limit: int = SMALL_BYTES) -> bytes:
    """Return the bytes of a file of a checkpoint.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: as for :func:`locate`, or it is longer than ``limit`` bytes.
    """
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise _refusal(f"it has {size:,} bytes, expected at most {limit:,}", folder / name)
        return file.read(size)


def size_of(folder: Path, name: str) -> int:
    """Return the bytes of a file of a checkpoint; raises as :func:`locate` does."""
    return locate(folder, name).stat().st_size


def is_file(folder: Path, name: str) -> bool:
    """Return whether a checkpoint has a file of that name, of its own."""
    try:
        locate(folder, name)
    except OSError:
        return False
    return True


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise _refusal(f"it is {kind}, expected a file", path)


def _refusal(reason: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, reason, str(path))
