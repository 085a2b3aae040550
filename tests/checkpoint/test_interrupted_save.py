"""A save that dies at any of its calls into the file system costs that save, and nothing else."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optim.checkpoint.files.folders import TRACKER, read_checksums
from moe_optim.checkpoint.files.metadata import read_blobs
from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.commands.train.run_folder import find_resume_point
from moe_optim.config import MoEOptimConfig
from tests.support.checkpoints.killed_saves import kill_saves
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

FLAGS = ["--train-iters", "2", "--eval-interval", "1000", "--save-interval", "1"]
FIRST, SECOND = "iter_0000001", "iter_0000002"
FOLDERS = ("new", "over another")

Choose = Callable[[list[str]], list[int]]


def some(calls: list[str]) -> list[int]:
    """The first call, one of the many writes, and some of those that finish the files."""
    end = len(calls)
    return [0, 4, end // 2, *range(end - 20, end, 5), end - 1]


def every(calls: list[str]) -> list[int]:
    return list(range(len(calls)))


def _train(folder: Path, choose: Choose) -> dict[str, list[str]]:
    """Train two iterations and save each; the second save is first killed in two ways.

    Into a new folder, and over a checkpoint of the same iteration with other contents. Returns the
    names of the calls of both.
    """
    from megatron.training import training

    checkpoints, stock = folder / "checkpoints", training.save_checkpoint
    calls = {}

    @functools.wraps(stock)
    def save(iteration: int, *args: Any, **kwargs: Any) -> None:
        def once() -> None:
            stock(iteration, *args, **kwargs)

        if iteration == 2 and not calls:
            calls["new"] = kill_saves(once, checkpoints, folder / "new", choose)
            shutil.copytree(checkpoints / FIRST, checkpoints / SECOND)
            calls["over another"] = kill_saves(once, checkpoints, folder / "over another", choose)
        else:
            once()

    training.save_checkpoint = save
    pretrain([*FLAGS, "--save", str(checkpoints)], MoEOptimConfig(format="mxfp8"))
    return calls


def kill(folder: Path, choose: Choose) -> Path:
    (calls,) = run_ranks(1, _train, folder, choose)
    for name in FOLDERS:
        last = [call for call in calls[name] if call != "mkdir"][-3:]  # newer versions make sure
        assert last == ["open", "write", "close"]  # of the tracker: nothing is written after it
        assert {"mkdir", "fsync", "rename", "replace"} <= set(calls[name])
        assert len(list((folder / name).glob("[0-9]*"))) == len(choose(calls[name]))
    return folder


@pytest.fixture(scope="module")
def killed_at_some(tmp_path_factory):
    return kill(tmp_path_factory.mktemp("some"), some)


@pytest.fixture(scope="module")
def killed_at_every(tmp_path_factory):
    return kill(tmp_path_factory.mktemp("every"), every)


def bytes_of(checkpoint: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted(checkpoint.rglob("*")) if path.is_file()
    }


def contents_of(checkpoint: Path) -> Any:
    """Everything that loading depends on: not the random id in .metadata, nor checksums of that."""
    blobs = read_blobs((checkpoint / ".metadata").read_bytes())
    return blobs, {name: (checkpoint / name).read_bytes() for name in {blob.file for blob in blobs}}


def check_what_is_left(folder: Path) -> None:
    """Each attempt left the first checkpoint alone, and of the second all or what is refused."""
    before, whole = folder / "before", folder / "whole"
    seen = set()
    for attempt in sorted(folder.glob("[0-9]*")):
        second = attempt / SECOND
        assert bytes_of(attempt / FIRST) == bytes_of(before / FIRST), attempt.name
        defect, damage = checkpoint_defect(second), list(corrupt_files(second))
        assert (defect is None) == (not damage), f"{attempt.name}: the quick check is enough"
        if defect is None:
            possible = [path / SECOND for path in (before, whole) if (path / SECOND).exists()]
            assert contents_of(second) in map(contents_of, possible), attempt.name
            assert read_checksums(second).archives, f"{attempt.name}: complete without checksums"
        expected = 1 if defect else 2
        assert find_resume_point(attempt).iteration == expected, attempt.name
        assert (attempt / TRACKER).read_text() == str(expected)
        seen.add(expected)
    assert list(corrupt_files(before / FIRST)) == []
    assert contents_of(whole / SECOND) != contents_of(before / FIRST)
    assert seen == {1, 2}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_killed_save_leaves_the_checkpoint_before_it_and_is_resumed_if_complete(
    killed_at_some, folder
):
    """What is left of the second checkpoint is refused, or holds to the bit what it should; then
    it is resumed from, even if the tracker does not name it yet or is torn itself."""
    check_what_is_left(killed_at_some / folder)


@pytest.mark.extended
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_save_may_be_killed_at_each_of_its_calls(killed_at_every, folder):
    check_what_is_left(killed_at_every / folder)
