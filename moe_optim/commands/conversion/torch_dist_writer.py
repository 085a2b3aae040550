"""Writes ``torch_dist`` checkpoints chunk by chunk, one tensor in memory at a time.

torch's ``FileSystemWriter`` keeps every tensor of a file until the file is closed; this writer does
not, and describes its chunks with torch's metadata classes.
"""

import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from moe_optim.checkpoint.files.folders import CONFIG_FILE
from moe_optim.checkpoint.files.metadata import METADATA, Blob
from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.errors import StateError

FILE_BYTES = 4 * 2**30
"""Size at which the writer starts the next file."""
_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@dataclass(frozen=True, slots=True)
class Entry:
    """An archive that was written: a chunk of a tensor, or an object."""

    blob: Blob
    of: TensorInfo | None
    """The whole tensor; None for an object."""


class TorchDistWriter:
    """Writes chunks of tensors and objects in call order; a context manager."""

    def __init__(self, folder: Path, number: int = 0) -> None:
        """Start in an existing ``folder``, with files of this ``number``."""
        self._folder, self._number = folder, number
        self._file: BinaryIO | None = None
        self._files = 0
        self.entries: list[Entry] = []
        """All that was written. :meth:`finish` describes it, and what other writers wrote if their
        entries are added."""

    def __enter__(self) -> "TorchDistWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write_chunk(
        self, key: str, of: TensorInfo, offsets: tuple[int, ...], chunk: Tensor
    ) -> None:
        """Write one chunk of a tensor.

        Args:
            key: key of the tensor.
            of: shape and dtype of the whole tensor.
            offsets: index of the chunk's first element in the tensor.
            chunk: contiguous tensor of any shape within the whole, of its dtype.

        Raises:
            OSError: writing failed; the disk may be full.
        """
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone()  # torch.save writes all of the memory
        with self._piece(key, offsets, tuple(chunk.shape), of) as file:
            try:
                torch.save(chunk, file)
            except RuntimeError as error:  # raised by close(), hiding the disk's error
                raise OSError(error.__context__ or error) from error

    def copy(self, reader: TorchDistReader, blob: Blob) -> None:
        """Copy ``blob``, a chunk or an object of ``reader``, unchanged."""
        with self._piece(blob.key, blob.offset, blob.shape, reader.tensors.get(blob.key)) as file:
            file.writelines(reader.blocks(blob))

    def write_object(self, key: str, content: bytes) -> None:
        """Write an object under ``key``; ``content`` is the output of ``torch.save``."""
        with self._piece(key, None) as file:
            file.write(content)

    def finish(self, config: Mapping[str, Any] | None = None) -> None:
        """Write ``.metadata``, then ``metadata.json`` from ``config`` or in Megatron's form.

        StateError if chunks of a tensor are missing.
        """
        # slow, and what only reads, or writes safetensors, does without
        from torch.distributed.checkpoint import filesystem, metadata

        self._close()
        entries: dict[str, Any] = {}
        storage: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.of is not None):
            blob, of = entry.blob, entry.of
            # equal names are one object, as pickle tells those of other processes apart
            key, file = sys.intern(blob.key), sys.intern(blob.file)
            offset = None if blob.offset is None else torch.Size(blob.offset)
            index = metadata.MetadataIndex(key, offset)
            storage[index] = filesystem._StorageInfo(file, blob.start, blob.length)
            if of is None or offset is None:
                entries[key] = metadata.BytesStorageMetadata()
                continue
            whole = metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=of.dtype),
                size=torch.Size(of.shape),
                chunks=[],
            )
            chunk = metadata.ChunkStorageMetadata(offsets=offset, sizes=torch.Size(blob.shape))
            entries.setdefault(key, whole).chunks.append(chunk)
        self._require_all_chunks()
        described = metadata.Metadata(
            state_dict_metadata=entries,
            storage_data=storage,
            version=filesystem.CURRENT_DCP_VERSION,
        )
        (self._folder / METADATA).write_bytes(pickle.dumps(described))
        (self._folder / CONFIG_FILE).write_text(json.dumps(dict(config or _CONFIG)))

    def _require_all_chunks(self) -> None:
        wholes = {entry.blob.key: prod(entry.of.shape) for entry in self.entries if entry.of}
        written: Counter[str] = Counter()
        for entry in self.entries:
            written[entry.blob.key] += prod(entry.blob.shape)
        for key, numel in wholes.items():
            if written[key] != numel:
                raise StateError(
                    f"{self._folder}: {key}: expected chunks of {numel:,} elements, got "
                    f"{written[key]:,}."
                )

    @contextmanager
    def _piece(
        self,
        key: str,
        offset: tuple[int, ...] | None,
        shape: tuple[int, ...] = (),
        of: TensorInfo | None = None,
    ) -> Iterator[BinaryIO]:
        """Yield the current file, and record what is written to it as one piece of ``key``."""
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self._close()
        if self._file is None:
            name = f"__{self._number}_{self._files}.distcp"
            self._file = (self._folder / name).open("wb")
            self._files += 1
        file, start = self._file, self._file.tell()
        yield file
        blob = Blob(Path(file.name).name, start, file.tell() - start, key, offset, shape)
        self.entries.append(Entry(blob, of))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
