"""What addresses of PTX mean on a CPU: memory of this process, and shared memory of blocks."""

import bisect
import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
_FIRST, _LAST = 1 << 16, 1 << 47  # numpy takes address 0 for no memory
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Memory:
    """Bytes by address, read and written by all threads at once.

    Args:
        space: one-dimensional bytes.
        first: address of the first.
        ranges: sorted starts and ends of what may be touched; None for all of it.
    """

    def __init__(
        self, space: Array, first: int = 0, ranges: tuple[list[int], list[int]] | None = None
    ) -> None:
        self._views = {
            width: space[: len(space) // 8 * 8].view(of) for width, of in _WIDTHS.items()
        }
        self._first, self._ranges = first, ranges

    def load(self, addresses: Array, width: int, count: int) -> list[Array]:
        """Return ``count`` unsigned arrays of values ``width`` bytes wide, one after the other.

        Raises:
            IndexError: an address that is not a multiple of the access, or of nobody's memory.
        """
        first = self._check(addresses, width, count)
        return [self._views[width][first + number] for number in range(count)]

    def store(self, addresses: Array, width: int, values: list[Array]) -> None:
        """Write arrays of values ``width`` bytes wide, one after the other.

        Raises:
            IndexError: as of ``load``.
        """
        first = self._check(addresses, width, len(values))
        for number, value in enumerate(values):
            self._views[width][first + number] = value

    def update(self, addresses: Array, combine: np.ufunc, values: Array) -> Array:
        """Combine what lies at addresses with values, one after the other; return what was there.

        Raises:
            IndexError: as of ``load``.
        """
        words = self._views[values.itemsize]
        places, index = np.unique(self._check(addresses, values.itemsize, 1), return_inverse=True)
        held = words[places].view(values.dtype)
        before = held[index]
        combine.at(held, index, values)
        words[places] = held.view(words.dtype)
        return before

    def _check(self, addresses: Array, width: int, count: int) -> Array:
        nbytes = width * count
        if (addresses % nbytes).any():
            raise IndexError(
                f"an access of {nbytes} bytes at {addresses[addresses % nbytes != 0][0]:#x}"
            )
        if len(addresses):
            for address in (int(addresses.min()), int(addresses.max())):
                self._check_one(address, nbytes)
        return (addresses - self._first) // width

    def _check_one(self, address: int, nbytes: int) -> None:
        if self._ranges is None:
            return
        starts, ends = self._ranges
        found = bisect.bisect_right(starts, address) - 1
        if found < 0 or address + nbytes > ends[found]:
            raise IndexError(f"{nbytes} bytes at {address:#x}, which is nobody's memory")


def process_memory() -> Memory:
    """Return the memory of this process: addresses are those of tensors on the CPU."""
    space = np.frombuffer((ctypes.c_uint8 * (_LAST - _FIRST)).from_address(_FIRST), dtype=np.uint8)
    starts, ends = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights, *_ = line.split()
        if rights.startswith("rw"):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            starts.append(start)
            ends.append(end)
    return Memory(space, _FIRST, (starts, ends))


def shared_memory(nbytes: int) -> Memory:
    """Return memory of blocks, filled with what nobody has written."""
    return Memory(np.full(-(-nbytes // 8) * 8, 0xA5, dtype=np.uint8))
