"""Reads ``.metadata`` of a torch_dist checkpoint and verifies its consistency.

``.metadata`` is a pickle without a checksum, which Megatron unpickles. Only torch's metadata
classes may occur in it; neither they nor torch are imported.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path, PurePath
from typing import Any

from moe_optim.checkpoint.files.checksum_manifest import DamageError
from moe_optim.checkpoint.files.pickles import (
    ITEM_BYTES,
    Made,
    Named,
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
_DTYPE = re.compile(r"bool|(?:u?int|b?float|complex|bits|qu?int)[0-9][0-9a-z_]*")

_LARGEST_BYTES = 512 * 2**20  # of ``.metadata``: about two million pieces
MAX_AXES = 16
"""Limit for the dimensions of a tensor."""
MAX_CUT_AXES = 5  # layers, experts, gate/up, rows, columns; each doubles the cost
MAX_NUMBER = 2**62
"""Limit for counts of elements and bytes."""
_MAX_NAME = 4096  # characters

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blob:
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
    described = sum(each.st_size for each in found if stat.S_ISREG(each.st_mode))
    return read_file(checkpoint, METADATA, min(max(SMALL_BYTES, described), _LARGEST_BYTES))


@lru_cache(maxsize=1)  # a load calls it twice, and 100,000 pieces take a second
def read_blobs(content: bytes) -> tuple[Blob, ...]:
    """Return the blobs described by ``.metadata``, in file order; DamageError if inconsistent.

    Verifies that every blob belongs to one key, that the chunks of a tensor cover each element
    exactly once, and that the blobs of a file are contiguous from its start and large enough for
    their elements.
    """
    try:
        metadata = read_pickle(content, _is_allowed)
    except ValueError as error:
        raise DamageError(METADATA, f"is cut off or foreign: {error}") from error
    try:
        with no_collections():
            return tuple(_blobs(metadata))
    except (LookupError, TypeError, ValueError) as error:
        raise DamageError(METADATA, f"is damaged: {error}") from error


def checked_shape(numbers: Any) -> Shape:
    """Return a valid shape or offset; TypeError for other types, ValueError for bad numbers."""
    shape = _numbers(numbers)
    if len(shape) > MAX_AXES:
        raise ValueError(f"expected at most {MAX_AXES} axes, got {len(shape):,}")
    if prod([extent or 1 for extent in shape]) > MAX_NUMBER:
        raise ValueError("expected at most 2^62 elements")
    return shape


def checked_name(name: Any) -> str:
    """Return a valid name; TypeError unless a string, ValueError if too long or not printable."""
    text: str = _typed(name, str)
    if len(text) > _MAX_NAME or not text.isprintable():
        raise ValueError(f"a name that is none: {text[:40]!r}")
    return text


def _is_allowed(named: Named) -> bool:
    is_dtype = named.module == "torch" and _DTYPE.fullmatch(named.name)
    return bool(is_dtype) or (named.module, named.name) in _NAMES


def _blobs(metadata: Any) -> list[Blob]:
    fields = _state(metadata, "Metadata")
    chunks = dict(_chunks(fields["state_dict_metadata"]))
    files: set[str] = set()
    blobs = []
    for index, extent in _typed(fields["storage_data"], dict).items():
        place, where = _state(extent, "_StorageInfo"), _state(index, "MetadataIndex")
        offset = where.get("offset")
        identity = (checked_name(where["fqn"]), None if offset is None else checked_shape(offset))
        if identity not in chunks:
            raise ValueError(f"{identity} is stored twice, or not as a part of a tensor")
        if place.get("transform_descriptors"):
            raise ValueError(f"{identity} is stored transformed, which cannot be checked")
        file = place["relative_path"]
        if file not in files:
            if PurePath(checked_name(file)).name != file:
                raise ValueError(f"{file!r} is not the name of a file")
            files.add(file)
        start, length = _numbers((place["offset"], place["length"]))
        blobs.append(Blob(file, start, length, *identity, *chunks.pop(identity)))
    if chunks:
        raise ValueError(f"{next(iter(chunks))} is not stored")
    blobs.sort(key=lambda blob: (blob.file, blob.start))
    _require_one_behind_the_other(blobs)
    return blobs


def _chunks(entries: Any) -> Iterator[tuple[tuple[str, Shape | None], tuple[Shape, str]]]:
    """Yield key and offset of every chunk of every tensor, with shape and dtype."""
    for key, entry in _typed(entries, dict).items():
        key = checked_name(key)
        if _is_a(entry, "BytesStorageMetadata"):
            yield (key, None), ((), "")
            continue
        fields = _state(entry, "TensorStorageMetadata")
        dtype = str(_typed(_typed(fields["properties"], Made).state[0], Named))
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{key}: expected one of {', '.join(ITEM_BYTES)}, got {dtype}")
        size = checked_shape(fields["size"])
        parts = [_state(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)]
        boxes = [(checked_shape(part["offsets"]), checked_shape(part["sizes"])) for part in parts]
        require_cover(key, boxes, size)
        for offset, shape in boxes:
            yield (key, offset), (shape, dtype)


def require_cover(key: str, boxes: list[tuple[Shape, Shape]], size: Shape) -> None:
    """Refuse chunks that do not cover every element of a tensor exactly once.

    Counts the corners of all boxes with alternating signs: shared corners of adjacent boxes cancel,
    and only the corners of the whole tensor remain.
    """
    if any(len(offset) != len(size) or len(shape) != len(size) for offset, shape in boxes):
        raise ValueError(f"{key} has {len(size)} axes, and a chunk has others")
    if len({offset for offset, _ in boxes}) < len(boxes):
        raise ValueError(f"two chunks of {key} begin at one place")
    whole = ((0,) * len(size), size)
    cut_axes = [
        axis
        for axis, extent in enumerate(size)
        if any(offset[axis] != 0 or shape[axis] != extent for offset, shape in boxes)
    ]
    if len(cut_axes) > MAX_CUT_AXES:
        raise ValueError(
            f"{key}: expected chunks of {MAX_CUT_AXES} cut axes at most, got {len(cut_axes)}"
        )
    signs = [prod(sides) for sides in product((1, -1), repeat=len(cut_axes))]
    corners: Counter[Shape] = Counter()
    for (offset, shape), weight in [*((box, 1) for box in boxes), (whole, -1)]:
        ends = [(offset[axis], offset[axis] + shape[axis]) for axis in cut_axes]
        for corner, sign in zip(product(*ends), signs, strict=True):
            corners[corner] += sign * weight
    if any(corners.values()):
        raise ValueError(f"the chunks of {key} do not cover its {size} once")


def _require_one_behind_the_other(blobs: list[Blob]) -> None:
    end_of: dict[str, int] = {}
    for blob in blobs:
        if blob.start != end_of.get(blob.file, 0):
            raise ValueError(f"{blob.name} does not lie behind the blob before it in {blob.file}")
        if blob.offset is not None and prod(blob.shape) * ITEM_BYTES[blob.dtype] > blob.length:
            raise ValueError(
                f"{blob.name}: {blob.dtype} {blob.shape} does not fit in {blob.length:,} bytes"
            )
        end_of[blob.file] = blob.end


def _is_a(value: Any, kind: str) -> bool:
    """Return whether a value's class has this name, with or without the older prefix ``MCore``."""
    return isinstance(value, Made) and value.by.name.removeprefix("MCore") == kind


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not _is_a(value, kind):
        raise TypeError(f"expected {kind}, got {value.by if isinstance(value, Made) else 'none'}")
    state: dict[str, Any] = _typed(value.state, dict)
    return state


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _numbers(value: Any) -> Shape:
    numbers: Shape = _typed(value, tuple)
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MAX_NUMBER:
            raise ValueError("expected whole numbers from 0 to 2^62, got others")
    return numbers
