"""Reads ``.metadata`` of a torch_dist checkpoint and verifies its consistency.

``.metadata`` is a pickle without a checksum, which Megatron unpickles. Only torch's metadata
classes may occur in it; neither they nor torch are imported. What it says is kept in a few arrays,
which ranks send each other at memory speed.
"""

import os
import re
import stat
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, compress, count, product, repeat
from math import prod
from operator import add, gt, itemgetter
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from moe_optim.checkpoint.files.folders import DamageError
from moe_optim.checkpoint.files.pickles import (
    ITEM_BYTES,
    Made,
    Named,
    Record,
    names_of,
    no_collections,
    read_pickle,
)
from moe_optim.checkpoint.files.untrusted_files import SMALL_BYTES, read_file

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_NAMES = names_of(  # torch's classes, and those of older Megatron versions
    {
        f"{_DCP}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
        "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
        f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
        f"{_DCP}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
        "torch.serialization": "_get_layout",
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
        "pathlib": "PosixPath",
        "pathlib._local": "PosixPath",
        "torch": "Size",
        "collections": "OrderedDict",
    }
)
_PER_CHUNK = names_of(
    {f"{_DCP}.metadata": "ChunkStorageMetadata MetadataIndex", f"{_DCP}.filesystem": "_StorageInfo"}
)
_DTYPE = re.compile(r"bool|(?:u?int|b?float|complex|bits|qu?int)[0-9][0-9a-z_]*")

_LARGEST_BYTES = 512 * 2**20  # of ``.metadata``: about two million pieces
MAX_AXES = 16
"""Limit for the dimensions of a tensor."""
MAX_CUT_AXES = 5  # layers, experts, gate/up, rows, columns; each doubles the cost
MAX_NUMBER = 2**62
"""Limit for counts of elements and bytes."""
_MAX_NAME = 4096  # characters

Shape = tuple[int, ...]


class Blob(NamedTuple):
    """One archive in a file of a checkpoint."""

    file: str
    start: int
    length: int
    key: str
    offset: Shape | None
    """Offset of a chunk in its tensor; None for an object."""
    shape: Shape = ()
    dtype: str = ""
    """Dtype as torch prints it: ``torch.bfloat16``."""

    @property
    def name(self) -> str:
        """Key, with the offset of a chunk."""
        return self.key if self.offset is None else f"{self.key} at {self.offset}"

    @property
    def corner(self) -> Shape:
        """Offset in its tensor; empty for an object."""
        return self.offset or ()

    @property
    def end(self) -> int:
        """End offset in the file, in bytes."""
        return self.start + self.length

    @property
    def nbytes(self) -> int:
        """Bytes of the values of a chunk; 0 for an object."""
        return prod(self.shape) * ITEM_BYTES[self.dtype] if self.dtype else 0


def read_metadata(checkpoint: Path) -> bytes:
    """Return the bytes of ``.metadata``.

    FileNotFoundError if it does not exist; OSError if it is not a file of the checkpoint, or larger
    than the files it describes.
    """
    with os.scandir(checkpoint) as entries:
        found = [entry.stat(follow_symlinks=False) for entry in entries if entry.name != METADATA]
    described = sum([each.st_size for each in found if stat.S_ISREG(each.st_mode)])
    return read_file(checkpoint, METADATA, min(max(SMALL_BYTES, described), _LARGEST_BYTES))


@lru_cache(maxsize=1)  # a load calls it twice, and 100,000 pieces take a second
def read_blobs(content: bytes) -> tuple[Blob, ...]:
    """Return the blobs described by ``.metadata``, in file order; DamageError if inconsistent.

    Verifies that every blob belongs to one key, that the chunks of a tensor cover each element
    exactly once, and that the blobs of a file are contiguous from its start and large enough for
    their elements.
    """
    with no_collections():
        try:
            metadata = read_pickle(content, _is_allowed, _PER_CHUNK)
        except ValueError as error:
            raise DamageError(METADATA, f"is truncated or not torch's: {error}") from error
        try:
            return tuple(_blobs(metadata))
        except (LookupError, TypeError, ValueError) as error:
            raise DamageError(METADATA, f"is damaged: {error}") from error


def checked_shape(numbers: Any) -> Shape:
    """Return a valid shape or offset; TypeError for other types, ValueError for bad numbers."""
    shape: Shape = _typed(numbers, tuple)
    _require_numbers(shape)
    if len(shape) > MAX_AXES:
        raise ValueError(f"expected at most {MAX_AXES} axes, got {len(shape):,}")
    if prod([extent or 1 for extent in shape]) > MAX_NUMBER:
        raise ValueError("expected at most 2^62 elements")
    return shape


def checked_name(name: Any) -> str:
    """Return a valid name; TypeError unless a string, ValueError if too long or not printable."""
    text: str = _typed(name, str)
    if len(text) > _MAX_NAME or not text.isprintable():
        raise ValueError(f"not a valid name: {text[:40]!r}")
    return text


def _is_allowed(named: Named) -> bool:
    is_dtype = named.module == "torch" and _DTYPE.fullmatch(named.name)
    return bool(is_dtype) or (named.module, named.name) in _NAMES


def _blobs(metadata: Any) -> list[Blob]:
    fields = _state(metadata, "Metadata")
    extents = _extents(_typed(fields["state_dict_metadata"], dict))
    stored: dict[Any, Any] = _typed(fields["storage_data"], dict)
    keys, offsets = _identities(_states(stored, "MetadataIndex"))
    files, starts, lengths = _places(_states(stored.values(), "_StorageInfo"))
    try:
        of_blobs = list(map(extents.pop, zip(keys, offsets, strict=True)))
    except KeyError as error:
        what = f"{error.args[0]} is stored twice, or not as a part of a tensor"
        raise ValueError(what) from None
    if extents:
        raise ValueError(f"{next(iter(extents))} is not stored")
    shapes, dtypes, needed = (map(itemgetter(place), of_blobs) for place in range(3))
    columns = zip(files, starts, lengths, keys, offsets, shapes, dtypes, strict=True)
    blobs = list(map(partial(tuple.__new__, Blob), columns))
    for number in compress(count(), map(gt, needed, lengths)):
        blob = blobs[number]
        what = f"{blob.dtype} {blob.shape} does not fit in {blob.length:,} bytes"
        raise ValueError(f"{blob.name}: {what}")
    blobs.sort(key=itemgetter(1))
    blobs.sort(key=itemgetter(0))
    _require_one_behind_the_other(blobs)
    return blobs


def _identities(indices: list[dict[str, Any]]) -> tuple[list[str], list[Shape | None]]:
    keys = [index["fqn"] for index in indices]
    offsets = [index.get("offset") for index in indices]
    _require_type(keys, str)
    _require_shapes([offset for offset in offsets if offset is not None])
    for key in set(keys):
        checked_name(key)
    return keys, offsets


def _places(places: list[dict[str, Any]]) -> tuple[list[str], list[int], list[int]]:
    files = [place["relative_path"] for place in places]
    starts = [place["offset"] for place in places]
    lengths = [place["length"] for place in places]
    if any(place.get("transform_descriptors") for place in places):
        raise ValueError("a part is stored transformed, which cannot be checked")
    _require_type(files, str)
    _require_numbers(starts)
    _require_numbers(lengths)
    for file in set(files):
        if PurePath(checked_name(file)).name != file:
            raise ValueError(f"{file!r} is not the name of a file")
    return files, starts, lengths


def _extents(entries: dict[Any, Any]) -> dict[tuple[str, Shape | None], tuple[Shape, str, int]]:
    """Return shape, dtype and bytes of every chunk of every tensor, by key and offset."""
    extents: dict[tuple[str, Shape | None], tuple[Shape, str, int]] = {}
    for key, entry in entries.items():
        key = checked_name(key)
        if _is_a(entry, "BytesStorageMetadata"):
            extents[key, None] = (), "", 0
            continue
        fields = _state(entry, "TensorStorageMetadata")
        dtype = str(_typed(_typed(fields["properties"], Made).state[0], Named))
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{key}: expected one of {', '.join(ITEM_BYTES)}, got {dtype}")
        size = checked_shape(fields["size"])
        chunks = _states(_typed(fields["chunks"], list), "ChunkStorageMetadata")
        offsets = [chunk["offsets"] for chunk in chunks]
        shapes = [chunk["sizes"] for chunk in chunks]
        _require_shapes(offsets)
        _require_shapes(shapes)
        require_tiling(key, offsets, shapes, size)
        needed = [prod(shape) * ITEM_BYTES[dtype] for shape in shapes]
        identities = zip(repeat(key), offsets, strict=False)
        of_chunks = zip(shapes, repeat(dtype), needed, strict=False)
        extents.update(zip(identities, of_chunks, strict=True))
    return extents


def require_tiling(key: str, offsets: list[Shape], shapes: list[Shape], size: Shape) -> None:
    """Refuse chunks that do not cover every element of a tensor exactly once.

    Counts the corners of all boxes with alternating signs: shared corners of adjacent boxes cancel,
    and only the corners of the whole tensor remain.
    """
    if set(map(len, chain(offsets, shapes))) - {len(size)}:
        raise ValueError(f"{key} has {len(size)} axes, but a chunk has a different number")
    if len(set(offsets)) < len(offsets):
        raise ValueError(f"two chunks of {key} begin at the same offset")
    ends = []  # of the boxes and then of the whole, on each axis that is cut
    for axis, extent in enumerate(size):
        low, lengths = [one[axis] for one in offsets], [one[axis] for one in shapes]
        if any(low) or set(lengths) - {extent}:
            high = list(map(add, low, lengths))
            if max(high) > extent:  # of a chunk without elements, whose corners cancel
                raise ValueError(f"a chunk of {key} extends beyond its {size}")
            ends.append(([*low, 0], [*high, extent]))
    if len(ends) > MAX_CUT_AXES:
        raise ValueError(
            f"{key}: expected chunks of {MAX_CUT_AXES} cut axes at most, got {len(ends)}"
        )
    corners: tuple[Counter[Shape], Counter[Shape]] = Counter(), Counter()
    for columns in product(*([(low, 0), (high, 1)] for low, high in ends)):
        is_negative = sum(side for _, side in columns) % 2
        sides = [column for column, _ in columns]
        *of_boxes, of_whole = zip(*sides, strict=True) if ends else [()] * (len(offsets) + 1)
        corners[is_negative].update(of_boxes)
        corners[1 - is_negative][of_whole] += 1
    if dict.__ne__(*corners):
        raise ValueError(f"the chunks of {key} do not cover its {size} once")


def _require_one_behind_the_other(blobs: list[Blob]) -> None:
    file, end = "", 0
    for blob in blobs:
        if blob[0] != file:
            file, end = blob[0], 0
        if blob[1] != end:
            raise ValueError(f"{blob.name} overlaps the blob before it in {file}")
        end += blob[2]


def _is_a(value: Any, kind: str) -> bool:
    """Return whether a value's class has this name, with or without the older prefix ``MCore``."""
    return isinstance(value, Made) and value.by.name.removeprefix("MCore") == kind


def _states(values: Iterable[Any], kind: str) -> list[dict[str, Any]]:
    """Return the states of many objects, which all have one class."""
    records = list(values)
    for named in set(map(type, records)):
        of_class = named.name if isinstance(named, Named) else "none"
        if of_class != kind or not issubclass(named, Record):
            raise TypeError(f"expected {kind}, got {of_class}")
    states = list(chain.from_iterable(records))
    if len(states) != len(records) or set(map(len, records)) - {1}:
        raise TypeError(f"expected one state of each {kind}, got more or fewer")
    _require_type(states, dict)
    return states


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not _is_a(value, kind):
        raise TypeError(f"expected {kind}, got {value.by if isinstance(value, Made) else 'none'}")
    state: dict[str, Any] = _typed(value.state, dict)
    return state


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _require_type(values: Iterable[Any], kind: type) -> None:
    for other in set(map(type, values)) - {kind}:
        raise TypeError(f"expected {kind.__name__}, got {other.__name__}")


def _require_shapes(values: list[Any]) -> None:
    """Refuse what :func:`checked_shape` refuses, of many shapes at once."""
    _require_type(values, tuple)
    numbers = list(chain.from_iterable(values))
    _require_numbers(numbers)
    axes = max(map(len, values), default=0)
    if axes > MAX_AXES or max(numbers, default=0) ** axes > MAX_NUMBER:
        for value in values:
            checked_shape(value)


def _require_numbers(numbers: Sequence[Any]) -> None:
    kinds = set(map(type, numbers))
    if kinds - {int} or (kinds and not 0 <= min(numbers) <= max(numbers) <= MAX_NUMBER):
        raise ValueError("expected whole numbers from 0 to 2^62, got other values")


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
        boxes = chain.from_iterable([(blob[4] or (), blob[5]) for blob in ordered])
        self._boxes = array("q", chain.from_iterable(boxes))
        self.keys_stored: dict[str, StoredKey] = {}
        row = number = 0
        for key, numbers in numbers_of.items():
            of_key = ordered[row : row + len(numbers)]
            rows = range(row, row + len(numbers))
            ends = [list(map(add, blob[4] or (), blob[5])) for blob in of_key]
            shape = tuple(map(max, zip(*ends, strict=True)))  # of chunks that cover it
            self.keys_stored[key] = StoredKey(shape, of_key[0].dtype, rows, number)
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
