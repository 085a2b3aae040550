"""Writes ``torch_dist`` checkpoints chunk by chunk, one tensor in memory at a time.

torch's ``FileSystemWriter`` keeps every tensor of a file until the file is closed; this writer does
not, and describes its chunks with torch's metadata classes.
"""

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_optim.checkpoint.files.folders import CONFIG_FILE
from moe_optim.checkpoint.files.metadata import METADATA
from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.checkpoint.files.torch_dist import TorchDistReader

FILE_BYTES = 4 * 2**30
"""Size at which the writer starts the next file."""
_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


class TorchDistWriter:
    """Writes chunks of tensors and objects in call order; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Start in an existing ``folder``."""
        self._folder = folder
        self._file: BinaryIO | None = None
        self._files = 0
        self._tensors: dict[str, TensorInfo] = {}
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._objects: list[str] = []
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

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
            chunk: contiguous tensor of any shape within the whole, of its dtype, in its own memory.

        Raises:
            OSError: writing failed; the disk may be full.
        """
        with self._piece(key, offsets) as file:
            try:
                torch.save(chunk, file)
            except RuntimeError as error:  # raised by close(), hiding the disk's error
                raise OSError(error.__context__ or error) from error
        self._take_chunk(key, of, offsets, tuple(chunk.shape))

    def write_whole(self, key: str, tensor: Tensor) -> None:
        """Write a ``tensor`` under ``key`` as one chunk, as :meth:`write_chunk` does."""
        info = TensorInfo(tuple(tensor.shape), tensor.dtype)
        self.write_chunk(key, info, (0,) * tensor.dim(), tensor)

    def copy(self, reader: TorchDistReader, key: str) -> None:
        """Copy all chunks of the tensor or object ``key`` from ``reader`` unchanged."""
        for blob in reader.blobs[key]:
            with self._piece(key, blob.offset) as file:
                file.writelines(reader.blocks(blob))
            if blob.offset is None:
                self._objects.append(key)
            else:
                self._take_chunk(key, reader.tensors[key], blob.corner, blob.shape)

    def write_object(self, key: str, content: bytes) -> None:
        """Write an object under ``key``; ``content`` is the output of ``torch.save``."""
        with self._piece(key, None) as file:
            file.write(content)
        self._objects.append(key)

    def finish(self, config: Mapping[str, Any] | None = None) -> None:
        """Write ``.metadata``, then ``metadata.json`` from ``config`` or in Megatron's form."""
        self._close()
        entries: dict[str, Any] = {key: BytesStorageMetadata() for key in self._objects}
        for key, info in self._tensors.items():
            entries[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=info.dtype),
                size=torch.Size(info.shape),
                chunks=self._chunks[key],
            )
        metadata = Metadata(
            state_dict_metadata=entries, storage_data=self._storage, version=CURRENT_DCP_VERSION
        )
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))
        (self._folder / CONFIG_FILE).write_text(json.dumps(dict(config or _CONFIG)))

    def _take_chunk(
        self, key: str, of: TensorInfo, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> None:
        self._tensors[key] = of
        box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        self._chunks[key].append(box)

    @contextmanager
    def _piece(self, key: str, offsets: tuple[int, ...] | None) -> Iterator[BinaryIO]:
        """Yield the current file, and record what is written to it as one piece of ``key``."""
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self._close()
        if self._file is None:
            self._file = (self._folder / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        file, start = self._file, self._file.tell()
        yield file
        index = MetadataIndex(key, None if offsets is None else torch.Size(offsets))
        name, length = Path(file.name).name, file.tell() - start
        self._storage[index] = _StorageInfo(relative_path=name, offset=start, length=length)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
