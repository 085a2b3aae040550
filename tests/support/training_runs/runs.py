"""Stand-ins for what a training run leaves on the disk, and for the disk itself."""

import contextlib
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
FAKE_RANK = "tests.support.training_runs.fake_rank"
"""Module of a rank that only pretends: see fake_rank.py."""


def write_checkpoint(checkpoints: Path, iteration: int) -> Path:
    """Write what Megatron's torch_dist format consists of, with a little state in it."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = checkpoints / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    state = {"weight": torch.arange(1000.0), "common_state/shard_0_1": {"iteration": iteration}}
    with warnings.catch_warnings(action="ignore"):  # it takes a single process for a mistake
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def write_events(
    folder: Path, scalars: Mapping[str, Sequence[tuple[int, float]]], start: float
) -> None:
    """Write one event file: per tag, (iteration, value) pairs, one second an iteration."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=f".{start:.0f}")
    for tag, points in scalars.items():
        for iteration, value in points:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            time_of = start + iteration
            writer.add_event(Event(wall_time=time_of, step=iteration, summary=summary))
    writer.close()


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a disk of ``size``, such as ``1m``, at ``path``; skips where that takes more rights."""
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small disk needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def is_running(pid: int) -> bool:
    """Say whether a process lives; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition, seconds: float = 10.0) -> bool:
    """Wait until ``condition()`` holds and say whether it came to that."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
