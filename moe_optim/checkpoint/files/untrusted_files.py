"""Opening and reading files of a checkpoint, which may come from anywhere.

A name may lead out of the folder of the checkpoint, through ``..`` or a link, or to a pipe that
nobody writes to or a device without an end. A file may be larger than memory, however little of it
the disk holds. JSON may be nested deeper than Python can follow.
"""

import errno
import io
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

SMALL_BYTES = 16 * 2**20
"""More than files have that are read whole, such as descriptions. As Python objects, JSON and
pickles take up to 64 times their bytes."""
_READ_AT_ONCE = 2**18
_DIGITS = 19  # of the numbers below 2^63, and one more

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def locate(folder: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint, without links.

    ``folder`` may be a link itself. Links within it are followed, and those of a cache of Hugging
    Face, from ``snapshots/<revision>`` to ``blobs`` beside ``snapshots``.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: it leads out of the folder, or is no regular file. ``strerror`` says which.
    """
    return Path(_locate(folder, name))


def _locate(folder: Path, name: str) -> str:
    # text, not Path: called once a tensor
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
    # a link or a pipe that has come to lie there meanwhile is not followed or waited for
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
        _locate(folder, name)
    except OSError:
        return False
    return True


def parse_json(content: bytes) -> Any:
    """Return the content of a JSON document.

    Raises:
        ValueError: it is none, is nested deeper than Python can follow, or holds a number that
            fits no 64 bits.
    """
    try:
        return json.loads(content, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("brackets within brackets, too many to follow") from error


def file_range(file: IO[bytes], start: int, length: int) -> IO[bytes]:
    """Return a range of an open file as a file of its own; EOFError if the file ends before it."""
    if length > _READ_AT_ONCE:
        return cast(IO[bytes], _FileRange(file, start, length))
    file.seek(start)
    content = file.read(length)
    if len(content) < length:
        raise EOFError(f"a file that ends {length - len(content):,} bytes too early")
    return io.BytesIO(content)


class _FileRange(io.RawIOBase):
    """A seekable view of ``length`` bytes from ``start``; fills buffers without a copy between."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"a position before the range: {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        filled: int = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        if filled < count:
            raise EOFError(f"a file that ends {count - filled:,} bytes too early")
        self._position += count
        return count


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise _refusal(f"it is {kind}, expected a file", path)


def _refusal(reason: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, reason, str(path))
