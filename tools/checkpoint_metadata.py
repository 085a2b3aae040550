"""Measures reading ``.metadata``: ``python -m tools.checkpoint_metadata [CHUNKS]``.

Prints the CPU seconds of Python's unpickler, of ours, and of the complete check.
"""

import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_optim.checkpoint.files.metadata import _is_allowed, read_blobs
from moe_optim.checkpoint.files.pickles import read_pickle

EXPERTS, ROWS, COLS = 64, 32, 16
CHUNK_BYTES = 4000


def make_metadata(chunks: int) -> bytes:
    """Return ``.metadata`` of tensors of 64 experts, one expert per chunk and file."""
    entries: dict[str, Any] = {}
    places = {}
    for layer in range(chunks // EXPERTS):
        key = (
            f"optimizer.state.exp_avg.decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"
        )
        boxes = [
            ChunkStorageMetadata(torch.Size([expert, 0, 0]), torch.Size([1, ROWS, COLS]))
            for expert in range(EXPERTS)
        ]
        entries[key] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([EXPERTS, ROWS, COLS]), boxes
        )
        for expert, box in enumerate(boxes):
            index = MetadataIndex(key, box.offsets, expert)
            places[index] = _StorageInfo(f"__{expert}_0.distcp", layer * CHUNK_BYTES, CHUNK_BYTES)
    return pickle.dumps(Metadata(entries, None, places))


def _seconds(act: Callable[[], Any]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def main(chunks: int = 100_000) -> None:
    """Print the measurements."""
    content = make_metadata(chunks)
    print(f"{chunks // EXPERTS * EXPERTS:,} chunks, {len(content):,} bytes")
    print(f"Python's own unpickling {_seconds(lambda: pickle.loads(content)):.2f} s")
    print(f"unpickling with stand-ins {_seconds(lambda: read_pickle(content, _is_allowed)):.2f} s")
    print(f"unpickling and all checks {_seconds(lambda: read_blobs(content)):.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
