"""Reads and writes safetensors: one file, or a folder with Hugging Face's index."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_optim.checkpoint.files.metadata import checked_name, checked_shape
from moe_optim.checkpoint.files.reader import FileFormat, Recorded, TensorInfo
from moe_optim.checkpoint.files.untrusted_files import given_file, locate, parse_json, read_file
from moe_optim.commands.console.checkpoint_paths import INDEX_FILE, SUFFIX
from moe_optim.errors import LayoutError, StateError

_NOTES = {  # fact in Recorded -> its key in the metadata of files
    "layout": "moe_optim.layout",
    "glu_interleave": "moe_optim.glu_interleave",
    "num_experts": "moe_optim.num_experts",
    "iteration": "iteration",
}
_DIGITS = 18  # maximum of a number
_SHARD = re.compile(r"(?P<stem>.*-)(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
_INDEX_BYTES = 32 * 2**20  # twice those of models with 100,000 expert tensors and as many scales

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Piece(NamedTuple):
    """Values of a tensor from one index of its first axis on."""

    name: str
    of: TensorInfo
    """The whole tensor."""
    first: int
    values: Tensor


class SafetensorsReader:
    """A safetensors file, or all of those in a folder; files are opened on demand."""

    format: FileFormat = "safetensors"
    """File format."""

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Args:
            path: safetensors file, or folder with an index or any number of such files.

        Raises:
            StateError: a file is missing, truncated or damaged, or is outside of the folder.
            LayoutError: two files contain the same tensor, or a dtype is unknown.
        """
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.objects: Mapping[str, int] = {}
        self._files: dict[str, str] = {}  # tensor -> file name
        metadata: dict[str, str] = {}
        expected = _indexed_files(path)
        for file in sorted(set(expected.values())) if expected else _files(path):
            metadata |= self._take_header(file)
        if missing := sorted(expected.keys() - self.tensors.keys()):
            raise StateError(
                f"{path / INDEX_FILE}: expected {missing[0]} in {expected[missing[0]]}, got a "
                "file without it. The checkpoint is not complete."
            )
        self.recorded = _read_record(path, metadata)

    def _take_header(self, file: str) -> dict[str, str]:
        with _opened(self.path, file) as opened:
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                if name in self._files:
                    raise LayoutError(
                        f"{self.path}: expected each tensor once, got {name} in "
                        f"{self._files[name]} and {file}. Remove one of the files."
                    )
                self.tensors[name] = _info(self.path / file, name, opened.get_slice(name))
                self._files[name] = file
            return opened.metadata() or {}

    def read(self, name: str, *index: int | range) -> Tensor:
        """Return a tensor or a part of it; arguments are those of ``CheckpointReader.read``."""
        spans = tuple(
            slice(one.start, one.stop) if isinstance(one, range) else one for one in index
        )
        with _opened(self.path, self._files[name]) as opened:
            whole: Tensor = opened.get_slice(name)[spans] if spans else opened.get_tensor(name)
        return whole.clone() if spans else whole  # a slice keeps all of its tensor

    def cuts(self, name: str, *index: int) -> Sequence[int]:
        """Return all places of an axis; arguments are those of ``CheckpointReader.cuts``."""
        return range(self.tensors[name].shape[len(index)] + 1)


def write_file(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, str],
    pieces: Iterable[Piece],
) -> None:
    """Write a safetensors file piece by piece.

    Args:
        path: file; must not exist.
        tensors: shape and dtype of every tensor, by name.
        metadata: text by name.
        pieces: pieces that cover every tensor once, in any order.

    Raises:
        StateError: pieces are left out, or do not fit.
        OSError: writing failed; the disk may be full.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name, info in sorted(tensors.items(), key=lambda one: (-one[1].dtype.itemsize, one[0])):
        starts[name], after = end, end + info.nbytes
        shape, offsets = list(info.shape), [end, after]
        header[name] = {"dtype": _NAMES[info.dtype], "shape": shape, "data_offsets": offsets}
        end = after
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    left = {name: info.nbytes for name, info in tensors.items()}
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        for name, _, first, values in pieces:
            left[name] -= values.nbytes
            file.seek(begin + starts[name] + (first * values[0].nbytes if first else 0))
            file.write(_bytes_of(values))
    if any(left.values()):
        name = next(name for name, nbytes in left.items() if nbytes)
        raise StateError(f"{path}: {name}: expected all of its bytes, got {left[name]:,} fewer.")


def notes_of(recorded: Recorded) -> dict[str, str]:
    """Return the metadata of a file that records facts about its checkpoint."""
    facts = {key: getattr(recorded, fact) for fact, key in _NOTES.items()}
    return {"format": "pt", **{key: str(one) for key, one in facts.items() if one is not None}}


def write_index(folder: Path, weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    """Write the index of a folder: tensor -> file."""
    index = {"metadata": dict(metadata), "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _bytes_of(values: Tensor) -> memoryview:
    if values.is_complex():
        values = torch.view_as_real(values)
    return memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())


@contextmanager
def _opened(path: Path, name: str) -> Iterator[Any]:
    """Open a file of a folder, or ``path`` itself if ``name`` is empty."""
    try:
        file = locate(path, name) if name else given_file(path)
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except FileNotFoundError as error:
        raise StateError(
            f"{path / name}: expected a safetensors file, got none. The checkpoint is not complete."
        ) from error
    except (SafetensorError, OSError, MemoryError) as error:  # from mapping the whole file
        said = error.strerror if isinstance(error, OSError) else error
        raise StateError(
            f"{path / name}: expected safetensors, got: {said or error}. "
            "The file is truncated, damaged or of another type: fetch or write it again."
        ) from error


def _info(file: Path, name: str, entry: Any) -> TensorInfo:
    kind = entry.get_dtype()
    if kind not in _DTYPES:
        raise LayoutError(
            f"{file}: {name!r}: expected one of {', '.join(_DTYPES)}, got {kind}. Store it as "
            "another type."
        )
    try:
        checked_name(name)
        return TensorInfo(checked_shape(tuple(entry.get_shape())), _DTYPES[kind])
    except ValueError as error:
        raise StateError(
            f"{file}: expected names and shapes of tensors, got: {error}. It is damaged."
        ) from error


def _require_all_shards(path: Path, names: list[str]) -> None:
    """Check that numbered files without an index are complete."""
    shards: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if found := _SHARD.fullmatch(name):
            shards.setdefault((found["stem"], found["total"]), set()).add(int(found["number"]))
    for (stem, total), there in shards.items():
        if missing := sorted(set(range(1, int(total) + 1)) - there):
            name = f"{stem}{missing[0]:05d}-of-{total}{SUFFIX}"
            raise StateError(f"{path}: expected {name}, got none. The checkpoint is not complete.")


def _files(path: Path) -> list[str]:
    names = sorted(file.name for file in path.glob(f"*{SUFFIX}")) if path.is_dir() else [""]
    for name in names:
        if not name.isprintable():
            raise StateError(f"{path}: expected names of files, got {name!r}. Rename it.")
    _require_all_shards(path, names)
    return names


def _indexed_files(path: Path) -> dict[str, str]:
    """Return tensor -> file from the index, if there is one."""
    index = path / INDEX_FILE
    try:
        names = parse_json(read_file(path, INDEX_FILE, _INDEX_BYTES))["weight_map"]
        return {checked_name(name): checked_name(file) for name, file in names.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise StateError(
            f"{index}: expected JSON with a weight_map, got {said}. "
            "The file is truncated or damaged: fetch or write it again."
        ) from error


def _read_record(path: Path, metadata: Mapping[str, str]) -> Recorded:
    found: dict[str, Any] = {fact: metadata.get(key) for fact, key in _NOTES.items()}
    for fact in ("glu_interleave", "num_experts", "iteration"):
        said = found[fact]
        if said is None:
            continue
        if not (said.isascii() and said.isdecimal() and len(said) <= _DIGITS):
            raise StateError(
                f"{path}: expected a number as {_NOTES[fact]}, got {said[:40]!r}. It is damaged."
            )
        found[fact] = int(said)
    return Recorded(**found)
