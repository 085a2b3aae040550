"""A range of an open file, read as if it were a file of its own."""

import io
from typing import IO, Any


class FileRange(io.RawIOBase):
    """A seekable view of ``length`` bytes from ``start``; fills buffers without a copy between."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move within the range, and return the new position; ValueError for one before it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"a position before the range: {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the range goes; EOFError if the file ends before it does."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        filled: int = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        if filled < count:
            raise EOFError(f"a file that ends {count - filled:,} bytes too early")
        self._position += count
        return count
