"""Content of ``.metadata`` in a few arrays, which ranks send each other at memory speed."""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import add, itemgetter

from moe_optim.checkpoint.files.metadata import Blob, Shape


@dataclass(frozen=True, slots=True)
class StoredKey:
    """What is stored under a key; ``shape`` and ``dtype`` are empty for an object."""

    shape: Shape
    dtype: str
    """Dtype as torch prints it: ``torch.bfloat16``."""
    rows: range
    """Rows of its chunks in the table."""
    first_number: int
    """Place of their offsets and shapes in the table."""


class BlobTable(Mapping[str, list[Blob]]):
    """Blobs by key, each key in file order; made when asked for.

    Attributes:
        keys_stored: shape, dtype and rows of every key.
    """

    def __init__(self, blobs: Sequence[Blob]) -> None:
        """Keep what blobs say.

        Args:
            blobs: all blobs of a checkpoint, in file order.
        """
        numbers_of: dict[str, list[int]] = defaultdict(list)
        first_of: dict[str, int] = {}
        for number, blob in enumerate(blobs):
            numbers_of[blob[3]].append(number)
            first_of.setdefault(blob[0], number)
        order = list(chain.from_iterable(numbers_of.values()))
        ordered = [blobs[number] for number in order]
        self._files = list(first_of)
        file_numbers = {name: at for at, name in enumerate(self._files)}
        self._file = array("i", [file_numbers[blob[0]] for blob in ordered])
        firsts = list(first_of.values())
        places = zip(order, self._file, strict=True)
        self._place = array("q", [number - firsts[file] for number, file in places])
        self._start = array("q", map(itemgetter(1), ordered))
        self._length = array("q", map(itemgetter(2), ordered))
        boxes = chain.from_iterable((blob[4] or (), blob[5]) for blob in ordered)
        self._boxes = array("q", chain.from_iterable(boxes))
        self.keys_stored: dict[str, StoredKey] = {}
        row = number = 0
        for key, numbers in numbers_of.items():
            of_key = ordered[row : row + len(numbers)]
            rows = range(row, row + len(numbers))
            self.keys_stored[key] = StoredKey(_shape_of(of_key), of_key[0].dtype, rows, number)
            row, number = rows.stop, number + 2 * len(of_key[0].shape) * len(of_key)

    def __getitem__(self, key: str) -> list[Blob]:
        stored = self.keys_stored[key]
        mine = slice(stored.rows.start, stored.rows.stop)
        files = [self._files[number] for number in self._file[mine]]
        starts, lengths = self._start[mine], self._length[mine]
        if not stored.dtype:
            return [Blob(files[0], starts[0], lengths[0], key, None)]
        axes, count = len(stored.shape), len(stored.rows)
        numbers = self._boxes[stored.first_number : stored.first_number + 2 * axes * count]
        tuples = list(zip(*[iter(numbers)] * axes, strict=True)) if axes else [()] * (2 * count)
        columns = files, starts, lengths, repeat(key), tuples[::2], tuples[1::2]
        rows = zip(*columns, repeat(stored.dtype), strict=False)
        return list(map(Blob._make, rows))

    def places(self, key: str) -> Sequence[int]:
        """Return the place of each blob of a key among the archives of its file."""
        rows = self.keys_stored[key].rows
        return self._place[rows.start : rows.stop]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_stored)

    def __len__(self) -> int:
        return len(self.keys_stored)


def _shape_of(blobs: list[Blob]) -> Shape:
    offsets, shapes = ([blob[place] or () for blob in blobs] for place in (4, 5))
    axes = zip(zip(*offsets, strict=True), zip(*shapes, strict=True), strict=True)
    return tuple(max(map(add, low, lengths)) for low, lengths in axes)
