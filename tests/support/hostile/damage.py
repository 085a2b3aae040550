"""Small checkpoints of every kind, and ways to damage their files."""

import io
import json
import queue
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from moe_optim.checkpoint.files.metadata import read_blobs


def save_with_megatron(folder: Path, iterations: tuple[int, ...], verify: bool) -> None:
    """Save checkpoints of one layout and other values with Megatron; run on one rank.

    Two files, tensors of several shapes and dtypes in several chunks, and objects.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from moe_optim.integration import cpu_runtime

    dist.init_process_group("gloo")
    cpu_runtime.install()
    filesystem_async._results_queue = queue.Queue()  # one process: no server is needed
    for iteration in iterations:
        generator = torch.Generator().manual_seed(iteration)
        weight = torch.randn(2, 6, 8, generator=generator)
        state = {
            f"weight{half}": ShardedTensor.from_rank_offsets(
                "experts.weight", weight[half].bfloat16(), (0, half, 2), prepend_axis_num=1
            )
            for half in range(2)
        }
        state["moment"] = ShardedTensor.from_rank_offsets("moment", weight.flatten().clone())
        state["count"] = ShardedTensor.from_rank_offsets("count", torch.tensor([iteration]))
        state["rng"] = ShardedObject("rng", {"seed": iteration}, (1,), (0,))
        state["iteration"] = iteration
        checkpoint = folder / f"iter_{iteration:07d}"
        checkpoint.mkdir()
        dist_checkpointing.save(
            state,
            str(checkpoint),
            TorchDistSaveShardedStrategy(thread_count=2),
            verify_integrity=verify,
        )


def save_legacy(folder: Path, iterations: tuple[int, ...]) -> None:
    """Write what ``--ckpt-format torch`` consists of, on two model-parallel ranks."""
    for iteration in iterations:
        generator = torch.Generator().manual_seed(iteration)
        for rank in range(2):
            path = folder / f"iter_{iteration:07d}" / f"mp_rank_0{rank}"
            path.mkdir(parents=True)
            for name in ("model_optim_rng.pt", "distrib_optim.pt"):
                values = torch.randn(6, 8, generator=generator)
                torch.save({"weight": values, "iteration": iteration}, path / name)


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


class Loader:
    """Loads a checkpoint as its first state wants it, and compares what it got with that."""

    def __init__(self, checkpoint: Path) -> None:
        self.wanted: dict[str, Any] = {}
        if (checkpoint / ".metadata").exists():
            metadata = dcp.FileSystemReader(checkpoint).read_metadata()
            self.wanted = metadata.state_dict_metadata
        self.names = [path.relative_to(checkpoint) for path in checkpoint.rglob("*.pt")]
        self.expected = self._load(checkpoint)

    def loads_the_same(self, checkpoint: Path) -> bool:
        """Load; raises whatever loading raises."""
        got = self._load(checkpoint)
        return all(_same(got[key], value) for key, value in self.expected.items())

    def _load(self, checkpoint: Path) -> dict[str, Any]:
        state: dict[str, Any] = {str(name): torch.load(checkpoint / name) for name in self.names}
        if self.wanted:
            if json.loads((checkpoint / "metadata.json").read_text())["sharded_backend"] == "":
                raise ValueError("no backend")
            of_dcp = {
                key: torch.empty(entry.size, dtype=entry.properties.dtype)
                if hasattr(entry, "chunks")
                else io.BytesIO()
                for key, entry in self.wanted.items()
            }
            reader = dcp.FileSystemReader(checkpoint)
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(of_dcp, storage_reader=reader, planner=planner, no_dist=True)
            state |= of_dcp
        return state


def _same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        got_bytes, want_bytes = (each.reshape(-1).view(torch.uint8) for each in (got, want))
        return got.dtype == want.dtype and torch.equal(got_bytes, want_bytes)
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(_same(got[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(_same, got, want))
    return got == want


def flip(content: bytes, position: int, bit: int) -> bytes:
    """Return ``content`` with one bit the other way round."""
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def _flip_some(path: Path, rng: random.Random, _other: Path) -> None:
    content = path.read_bytes()
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        content = flip(content, rng.randrange(len(content)), rng.randrange(8))
    path.write_bytes(content)


def _truncate(path: Path, rng: random.Random, _other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def _append(path: Path, rng: random.Random, _other: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def _delete(path: Path, _rng: random.Random, _other: Path) -> None:
    path.unlink()


def _empty(path: Path, _rng: random.Random, _other: Path) -> None:
    path.write_bytes(b"")


def _overwrite(path: Path, rng: random.Random, _other: Path) -> None:
    """A disk block of something else in the middle of the file."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    block = rng.randbytes(min(512, len(content) - start))
    content[start : start + len(block)] = rng.choice((block, bytes(len(block))))
    path.write_bytes(content)


def _foreign(path: Path, rng: random.Random, _other: Path) -> None:
    archive = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, archive)
    path.write_bytes(rng.choice((b"{}", b"\x80\x04N.", archive.getvalue(), rng.randbytes(300))))


def _directory(path: Path, _rng: random.Random, _other: Path) -> None:
    path.unlink()
    path.mkdir()


def _of_another(path: Path, _rng: random.Random, other: Path) -> None:
    """The file of that name of another checkpoint."""
    shutil.copy(other, path)


def _swapped(path: Path, rng: random.Random, _other: Path) -> None:
    """Exchanged for another file beside it."""
    beside = [each for each in files_of(path.parent) if each != path]
    with_this = rng.choice(beside)
    partial = path.with_name("partial")
    path.rename(partial)
    with_this.rename(path)
    partial.rename(with_this)


KINDS: dict[str, Callable[[Path, random.Random, Path], None]] = {
    "bits flipped": _flip_some,
    "truncated": _truncate,
    "longer": _append,
    "deleted": _delete,
    "empty": _empty,
    "overwritten": _overwrite,
    "foreign": _foreign,
    "a directory": _directory,
    "of another checkpoint": _of_another,
    "swapped": _swapped,
}
SAME_LAYOUT = ("of another checkpoint", "swapped")
"""What cannot be found where nothing was recorded: files whose archives are whole and fit."""
ANY_ARCHIVE = (*SAME_LAYOUT, "foreign")
"""The same, where nothing says what an archive has to hold."""


def damages(
    checkpoint: Path, other: Path, kinds: list[str], count: int, seed: int
) -> Iterator[tuple[str, list[Path]]]:
    """Damage one file after the other, in turn in every way; each is mended before the next.

    Yields:
        The kind of damage, and the files that are not any more what they were.
    """
    original = {path: path.read_bytes() for path in files_of(checkpoint)}
    rng = random.Random(seed)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        path = rng.choice(list(original))
        KINDS[kind](path, rng, other / path.relative_to(checkpoint))
        damaged = [each for each, content in original.items() if _holds(each) != content]
        try:
            yield kind, damaged
        finally:
            for each in damaged:
                if each.is_dir():
                    each.rmdir()
                each.write_bytes(original[each])


def _holds(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def archive_bytes(checkpoint: Path, key: str) -> tuple[Path, int, int]:
    """Return the file, start and end of the first blob of a key."""
    blobs = read_blobs((checkpoint / ".metadata").read_bytes())
    blob = next(blob for blob in blobs if blob.key.startswith(key))
    return checkpoint / blob.file, blob.start, blob.end


def flip_in(checkpoint: Path, key: str) -> str:
    """Flip a bit of what was saved under a key, and return the name of the file."""
    path, start, end = archive_bytes(checkpoint, key)
    content = path.read_bytes()
    archive = zipfile.ZipFile(io.BytesIO(content[start:end]))
    record = next(row for row in archive.infolist() if row.filename.endswith(("/data/0", ".pkl")))
    position = content.index(archive.read(record), start + record.header_offset)
    path.write_bytes(flip(content, position + record.file_size // 2, 0))
    return path.name


def flip_in_archive(path: Path) -> None:
    """Flip a bit in the middle of the largest record of one ``torch.save`` file."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda row: row.file_size)
        content = path.read_bytes()
        position = content.index(archive.read(record), record.header_offset)
    path.write_bytes(flip(content, position + record.file_size // 2, 6))
