"""Measures reading ``.metadata``: ``python -m tools.checkpoint_metadata [CHUNKS]``.

Prints CPU seconds: Python's unpickler alone; the first rank's unpickling and checks, and its table
for all ranks; the other ranks' reading of that table, with the chunks of one key in eight.
"""

import gc
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

from moe_optim.checkpoint.files.metadata import BlobTable, read_blobs
from moe_optim.checkpoint.files.pickles import no_collections
from moe_optim.checkpoint.load_session import stored_metadata

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


def _seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.process_time()
    found = act()
    return time.process_time() - began, found


def _look_up(sent: bytes) -> None:
    entries: Any = stored_metadata(pickle.loads(sent)).state_dict_metadata
    for key in list(entries)[::8]:
        list(entries[key].chunks)


def main(chunks: int = 100_000) -> None:
    """Print the measurements."""
    content = make_metadata(chunks)
    print(f"{chunks // EXPERTS * EXPERTS:,} chunks, {len(content):,} bytes")
    print(f"Python's own unpickling {_seconds(lambda: pickle.loads(content))[0]:.2f} s")
    seconds, blobs = _seconds(lambda: read_blobs(content))
    print(f"first rank: unpickling and all checks {seconds:.2f} s")
    with no_collections():
        seconds, sent = _seconds(lambda: pickle.dumps(BlobTable(blobs)))
    read_blobs.cache_clear()
    blobs = ()
    print(f"first rank: a table for all ranks {seconds:.2f} s, {len(sent):,} bytes")
    print(f"other ranks: taking it, and looking up {_seconds(lambda: _look_up(sent))[0]:.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
