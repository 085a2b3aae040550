"""Metadata of a checkpoint as torch reads it, made of a vetted table key by key."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_optim.checkpoint.files.blob_table import BlobTable

type Entry = TensorStorageMetadata | BytesStorageMetadata


def stored_metadata(table: BlobTable) -> Metadata:
    """Return metadata of tensors and objects; places in files are not among it."""
    entries: Any = _Entries(table)
    return Metadata(entries, None, {})


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by name, such as ``torch.bfloat16``."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


class _Entries(Mapping[str, Entry]):
    """Entries by key; one that was made is kept, since Megatron sets its size for a while."""

    def __init__(self, table: BlobTable) -> None:
        self._table = table
        self._made: dict[str, Entry] = {}

    def __getitem__(self, key: str) -> Entry:
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, key: str) -> Entry:
        stored = self._table.keys_stored[key]
        if not stored.dtype:
            return BytesStorageMetadata()
        properties = TensorProperties(dtype=dtype_named(stored.dtype))
        chunks: Any = _Chunks(self._table, key)
        return TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class _Chunks(Sequence[ChunkStorageMetadata]):
    def __init__(self, table: BlobTable, key: str) -> None:
        self._table, self._key = table, key
        self._made: list[ChunkStorageMetadata] | None = None

    @overload
    def __getitem__(self, number: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, number: slice) -> list[ChunkStorageMetadata]: ...

    def __getitem__(self, number: int | slice) -> Any:
        if self._made is None:
            self._made = [
                ChunkStorageMetadata(torch.Size(blob.corner), torch.Size(blob.shape))
                for blob in self._table[self._key]
            ]
        return self._made[number]

    def __len__(self) -> int:
        return len(self._table.keys_stored[self._key].rows)
