"""What ``.metadata`` of a torch_dist checkpoint says, and whether that fits together.

``.metadata`` is a pickle without a checksum. It is read into plain records that stand for the
classes it names: no code of theirs runs, and torch is not imported. What names anything else is
refused, where ``pickles`` makes an inert object of it: a common state may hold what its run likes.
"""

import io
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import PurePath
from typing import Any

from moe_optim.checkpoints.records import DamageError

METADATA = ".metadata"
"""Name of the file."""

_DCP = "torch.distributed.checkpoint"
_METADATA_CLASSES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
_PLAN_CLASSES = {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"}
_STAND_FOR = {  # classes that are stood for: torch's, and what older Megatrons put beside them
    f"{_DCP}.metadata": _METADATA_CLASSES,
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_DCP}.planner": _PLAN_CLASSES,
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Blob:
    """One archive in a file of a checkpoint."""

    file: str
    start: int
    length: int
    key: str
    offset: Shape | None  # of a chunk in its tensor; None: not a tensor
    shape: Shape = ()
    dtype: str = ""  # as torch prints it: torch.bfloat16

    @property
    def name(self) -> str:
        """Say which blob it is."""
        return self.key if self.offset is None else f"{self.key} at {self.offset}"

    @property
    def end(self) -> int:
        """Return where the next blob of the file starts."""
        return self.start + self.length


class _Record:
    """Stands for an object of any class; holds the state it was pickled with."""

    state: Any = None

    def __init__(self, *_args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records:
    """The part of an unpickler that names turn up in."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch":
            return f"torch.{name}"  # a dtype
        if name in _STAND_FOR.get(module, ()):
            return type(name.removeprefix("MCore"), (_Record,), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, as no checkpoint does")


class _FastUnpickler(_Records, pickle.Unpickler):
    """One flipped bit can make it ask for 64 GiB: for pickles whose checksum is known to hold."""


class _SafeUnpickler(_Records, pickle._Unpickler):
    """Twenty times slower, in Python alone, with memory for what the pickle holds."""


def read_blobs(content: bytes, *, is_verified: bool) -> list[Blob]:
    """Return the blobs that ``.metadata`` names, in the order they lie in files.

    Every blob belongs to one key; the chunks of a tensor cover it, each element once; the blobs of
    a file lie one behind the other from its start.

    Args:
        content: of the file ``.metadata``.
        is_verified: whether a checksum has shown that nothing changed since it was written.

    Raises:
        DamageError: it is no metadata of a checkpoint, or its parts contradict each other.
    """
    unpickler = _FastUnpickler if is_verified else _SafeUnpickler
    try:
        metadata = unpickler(io.BytesIO(content)).load()
    except Exception as error:  # whatever a cut off pickle makes of itself
        raise DamageError(METADATA, f"is cut off or foreign: {error}") from error
    try:
        return _blobs(metadata)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamageError(METADATA, f"is damaged: {error}") from error


def _blobs(metadata: Any) -> list[Blob]:
    fields = _state(metadata, "Metadata")
    chunks = dict(_chunks(fields["state_dict_metadata"]))
    blobs = []
    for index, extent in _typed(fields["storage_data"], dict).items():
        place = _state(extent, "_StorageInfo")
        where = _state(index, "MetadataIndex")
        offset = where.get("offset")
        identity = (where["fqn"], None if offset is None else _shape(offset))
        if identity not in chunks:
            raise ValueError(f"{identity} is stored twice, or not as a part of a tensor")
        if place.get("transform_descriptors"):
            raise ValueError(f"{identity} is stored transformed, which cannot be checked")
        shape, dtype = chunks.pop(identity)
        file = _typed(place["relative_path"], str)
        if PurePath(file).name != file:
            raise ValueError(f"{file!r} is not the name of a file")
        start, length = _shape((place["offset"], place["length"]))
        blobs.append(Blob(file, start, length, *identity, shape, dtype))
    if chunks:
        raise ValueError(f"{next(iter(chunks))} is not stored")
    blobs.sort(key=lambda blob: (blob.file, blob.start))
    _require_one_behind_the_other(blobs)
    return blobs


def _chunks(entries: Any) -> Iterator[tuple[tuple[str, Shape | None], tuple[Shape, str]]]:
    """Yield key and offset of every chunk of every tensor with its shape and dtype."""
    for key, entry in _typed(entries, dict).items():
        if type(entry).__name__ == "BytesStorageMetadata":
            yield (_typed(key, str), None), ((), "")
            continue
        fields = _state(entry, "TensorStorageMetadata")
        dtype = _typed(_typed(fields["properties"], _Record).state[0], str)
        size = _shape(fields["size"])
        parts = [_state(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)]
        boxes = [(_shape(part["offsets"]), _shape(part["sizes"])) for part in parts]
        _require_cover(_typed(key, str), boxes, size)
        for offset, shape in boxes:
            yield (key, offset), (shape, dtype)


def _require_cover(key: str, boxes: list[tuple[Shape, Shape]], size: Shape) -> None:
    """Refuse chunks that do not hold every element of a tensor exactly once.

    A box is known by its corners with alternating signs; those of boxes side by side cancel where
    they meet, so that the corners of the whole are left.
    """
    if any(len(offset) != len(size) or len(shape) != len(size) for offset, shape in boxes):
        raise ValueError(f"{key} has {len(size)} axes, and a chunk has others")
    whole = ((0,) * len(size), size)
    cut_axes = [
        axis
        for axis, extent in enumerate(size)
        if any(offset[axis] != 0 or shape[axis] != extent for offset, shape in boxes)
    ]
    corners: Counter[Shape] = Counter()
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        for corner, sign in _corners(*box, cut_axes):
            corners[corner] += sign * weight
    if any(corners.values()) or len({offset for offset, _ in boxes}) < len(boxes):
        raise ValueError(f"the chunks of {key} do not cover its {size} once")


def _corners(offset: Shape, shape: Shape, axes: list[int]) -> Iterator[tuple[Shape, int]]:
    """Yield the corners of a box on some axes; -1 for those at an odd number of upper ends."""
    ends = [(offset[axis], offset[axis] + shape[axis]) for axis in axes]
    signs = product((1, -1), repeat=len(axes))
    for corner, sides in zip(product(*ends), signs, strict=True):
        yield corner, prod(sides)


def _require_one_behind_the_other(blobs: list[Blob]) -> None:
    end_of: dict[str, int] = {}
    for blob in blobs:
        if blob.start != end_of.get(blob.file, 0):
            raise ValueError(f"{blob.name} does not lie behind the blob before it in {blob.file}")
        end_of[blob.file] = blob.end


def _state(record: Any, kind: str) -> dict[str, Any]:
    if type(record).__name__ != kind:
        raise TypeError(f"expected {kind}, got {type(record).__name__}")
    state: dict[str, Any] = _typed(_typed(record, _Record).state, dict)
    return state


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _shape(value: Any) -> Shape:
    numbers = tuple(_typed(number, int) for number in value)
    if any(number < 0 for number in numbers):
        raise ValueError(f"expected no negative number, got {numbers}")
    return numbers
