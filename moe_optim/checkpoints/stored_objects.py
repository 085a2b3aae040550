"""Objects, not tensors, that a torch_dist checkpoint holds, read one at a time."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from moe_optim.errors import LayoutError


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """What a checkpoint holds besides tensors."""

    checkpoint: Path
    metadata: Metadata

    @classmethod
    def of(cls, checkpoint: Path) -> "StoredObjects":
        """Read the list of contents of a checkpoint folder."""
        return cls(checkpoint, FileSystemReader(checkpoint).read_metadata())

    def object_keys(self) -> list[str]:
        """Return the keys of all objects, as they are stored: with the number of their shard."""
        entries = self.metadata.state_dict_metadata
        return sorted(key for key in entries if isinstance(entries[key], BytesStorageMetadata))

    def tensor_keys(self) -> Sequence[str]:
        """Return the keys of all tensors."""
        entries = self.metadata.state_dict_metadata
        return sorted(key for key in entries if not isinstance(entries[key], BytesStorageMetadata))

    def read(self, key: str) -> Any:
        """Return an object of plain containers, numbers, strings and tensors.

        Raises:
            LayoutError: it holds anything else, or its bytes are damaged.
        """
        extent = self.metadata.storage_data[MetadataIndex(key)]
        path = self.checkpoint / extent.relative_path
        with path.open("rb") as file:
            file.seek(extent.offset)
            content = file.read(extent.length)
        try:
            (value,) = torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:  # whatever damaged bytes make of themselves
            raise LayoutError(
                f"{path}: {key}: expected an object of plain values, got something else "
                f"({error}). Load another checkpoint."
            ) from error
        return value
