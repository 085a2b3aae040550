"""Safe access to the files of a checkpoint from an untrusted source.

Guards against names that leave the folder (``..``, links), pipes without a writer, endless devices,
sparse files larger than memory, and JSON nested too deeply for Python.
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
"""Default limit for files read whole, in bytes. As Python objects, JSON and pickles take up to 64
times their size."""
_READ_AT_ONCE = 2**18
_EDGE_BYTES = 2**11
_DIGITS = 19  # of 2^63 - 1

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def locate(folder: Path, name: str) -> str:
    """Return the resolved path of a file of a checkpoint.

    ``folder`` may be a link. Links within it are followed, and those of a Hugging Face cache, from
    ``snapshots/<revision>`` to ``blobs`` beside ``snapshots``.

    Raises:
        FileNotFoundError: file does not exist.
        OSError: path leaves the folder, or is not a regular file; ``strerror`` says which.
    """
    # str rather than Path for speed: called once per tensor
    try:
        root = os.path.realpath(folder, strict=True)
        path = os.path.realpath(os.path.join(root, name), strict=True)  # noqa: PTH118
    except ValueError as error:  # NUL bytes, or an unencodable name
        raise _refusal("it is not a file name", folder) from error
    above, parent = os.path.split(os.path.dirname(root))  # noqa: PTH120, PTH206
    inside = [root, f"{above}/blobs"] if parent == "snapshots" else [root]
    if not f"{path}/".startswith(tuple([f"{each}/" for each in inside])):
        raise _refusal("it points outside the checkpoint", folder / name)
    _require_regular(os.stat(path), folder / name)  # noqa: PTH116
    return path


def open_file(folder: Path, name: str) -> BufferedReader:
    """Open a file of a checkpoint for reading; raises like :func:`locate`."""
    # do not follow a link, or wait for a pipe, that has replaced the file meanwhile
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(locate(folder, name), flags)
    try:
        _require_regular(os.fstat(descriptor), folder / name)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def given_file(path: Path) -> Path:
    """Return a path given by the user, which may link anywhere; OSError if not a regular file."""
    _require_regular(path.stat(), path)
    return path


def read_file(folder: Path, name: str, limit: int = SMALL_BYTES) -> bytes:
    """Return the bytes of a file of a checkpoint; raises like :func:`locate`.

    OSError also if it is longer than ``limit`` bytes.
    """
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise _refusal(f"it has {size:,} bytes, expected at most {limit:,}", folder / name)
        return file.read(size)


def size_of(folder: Path, name: str) -> int:
    """Return the size of a file in bytes; raises like :func:`locate`."""
    return os.stat(locate(folder, name)).st_size  # noqa: PTH116


def is_file(folder: Path, name: str) -> bool:
    """Return whether a checkpoint contains a file of this name, not a link out of it."""
    try:
        locate(folder, name)
    except OSError:
        return False
    return True


def parse_json(content: bytes) -> Any:
    """Return the content of a JSON document.

    ValueError if it is invalid, nested too deeply, or contains a number beyond 64 bits.
    """
    try:
        return json.loads(content, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("brackets that are nested too deeply") from error


def file_range(file: IO[bytes], start: int, length: int) -> IO[bytes]:
    """Return a range of an open file as a file; EOFError if the file ends before it."""
    if length > _READ_AT_ONCE:
        return cast(IO[bytes], _FileRange(file, start, length))
    content = bytearray(length)
    _read_into(file, start, memoryview(content))
    return io.BytesIO(content)


def _read_into(file: IO[bytes], start: int, memory: memoryview) -> None:
    """Fill memory from a position of a file, and read no byte beyond."""
    filled = 0
    while filled < len(memory):
        count = os.preadv(file.fileno(), [memory[filled:]], start + filled)
        if not count:
            raise EOFError(f"a file that is {len(memory) - filled:,} bytes too short")
        filled += count


class _FileRange(io.RawIOBase):
    """Seekable view of ``length`` bytes from ``start``; reads into buffers without a copy.

    Both ends, where an archive has everything but values, are read once.
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0
        self._edges: dict[int, bytearray] = {}

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
        low, self._position = self._position, self._position + count
        for edge in (0, max(0, self._length - _EDGE_BYTES)):
            if edge <= low and low + count <= min(edge + _EDGE_BYTES, self._length):
                view[:count] = memoryview(self._edge(edge))[low - edge : low - edge + count]
                return count
        _read_into(self._file, self._start + low, view[:count])
        return count

    def _edge(self, first: int) -> bytearray:
        if first not in self._edges:
            held = bytearray(min(_EDGE_BYTES, self._length))
            _read_into(self._file, self._start + first, memoryview(held))
            self._edges[first] = held
        return self._edges[first]


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
