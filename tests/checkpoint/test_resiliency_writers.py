"""Saves through nvidia-resiliency-ext: by its asynchronous writer, and as local checkpoints."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.checkpoint.saving import writing_together
from moe_optim.errors import StateError
from tests.support.checkpoints.checkpoint_journey import Journey, Station, run_once

pytest.importorskip("nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async")

FLAT, BY_NAME = "dp_reshardable", "fully_reshardable"
LATER = {"async_sharded_save": True, "async_strategy": "nvrx"}
GROUPED = Station()
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async.FileSystemWriterAsync"
FAULTS = {  # rank that fails, and in what
    "plan": (1, f"{WRITER}.prepare_write_data"),
    "file": (1, f"{WRITER}._write_bucket_to_storage"),
    "results": (1, f"{WRITER}.retrieve_write_results"),
    ".metadata": (0, f"{WRITER}.finish"),
}
LOCAL = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"


def _save_and_change(sharding: str, folder: Path) -> int:
    """Change all states between the call and the writing; return how many were compared."""
    journey = Journey(GROUPED).fill()
    request = journey.save(folder, sharding, **LATER)
    journey.scramble()
    request.execute_sync()
    assert list(corrupt_files(folder)) == []
    return Journey(GROUPED).scramble().load(folder).check()


def _save_and_keep_plans(folder: Path) -> tuple[list[bool], int]:
    """Save twice as for ``--ckpt-assume-constant-structure``, with other values.

    Returns whether the writer was to use tensors of an earlier save, and how many elements of the
    last checkpoint were compared.
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async

    kept, writer = [], filesystem_async.FileSystemWriterAsync
    stock = writer.prepare_write_data

    def prepare(self: Any, *args: Any) -> None:
        kept.append(self.use_cached_data_structure)
        stock(self, *args)

    journey, strategy = (
        Journey(GROUPED).scramble(),
        TorchDistSaveShardedStrategy(cached_metadata=True),
    )
    with mock.patch.object(writer, "prepare_write_data", prepare):
        for number in range(3):
            request = journey.save(
                folder / str(number), BY_NAME, sharded_strategy=strategy, **LATER
            )
            request.execute_sync()
            journey.fill()
    return kept, Journey(GROUPED).scramble().load(folder / "2").check()


def _fail(name: str, folder: Path) -> tuple[str, str | None]:
    """Return the error of a save in which one rank fails, and why its folder is incomplete."""
    rank, target = FAULTS[name]
    fails = torch.distributed.get_rank() == rank
    journey, said = Journey(GROUPED).fill(), "saved"
    with mock.patch(target, side_effect=FULL) if fails else nullcontext():
        try:
            journey.save(folder, BY_NAME, **LATER).execute_sync()
        except (OSError, StateError) as error:
            said = str(error)
    return said, checkpoint_defect(folder)


def _manager(folder: Path) -> Any:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

    return local_manager.LocalCheckpointManager(folder)


def _save_locally(algo: str, folder: Path) -> int:
    journey = Journey(GROUPED).fill().keep(algo)
    manager = _manager(folder)
    with writing_together(manager, is_synchronous=True):
        manager.save(journey.kept, 7)
    journey.scramble()
    manager = _manager(folder)
    assert manager.find_latest() == 7
    journey.kept, _ = manager.load()
    return journey.restore(algo).check()


def _fail_locally(folder: Path) -> tuple[str, int]:
    """Return the error of a local save in which one rank fails, and the newest that all have."""
    journey, manager, said = Journey(GROUPED).fill().keep("atomic"), _manager(folder), "saved"
    fails = torch.distributed.get_rank() == 1
    target = f"{LOCAL}.LocalCheckpointManager._save"
    with mock.patch(target, side_effect=FULL) if fails else nullcontext():
        try:
            with writing_together(manager, is_synchronous=True):
                manager.save(journey.kept, 7)
        except (OSError, StateError) as error:
            said = str(error)
    return said, _manager(folder).find_latest()


def _fail_locally_later(folder: Path) -> tuple[str, int]:
    """As above, of an asynchronous save, whose writer is a process of its own."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    journey, manager, said = Journey(GROUPED).fill().keep("atomic"), _manager(folder), "saved"
    queue, fails = AsyncCallsQueue(persistent=False), torch.distributed.get_rank() == 1
    target = f"{LOCAL}.LocalCheckpointManager._save"
    with (
        writing_together(manager, is_synchronous=False),
        mock.patch(target, side_effect=FULL) if fails else nullcontext(),
    ):
        queue.schedule_async_request(manager.save(journey.kept, 7, is_async=True))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except Exception as error:
        said = str(error)
    queue.close()
    return said, _manager(folder).find_latest()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of a name, which gives what two ranks found."""
    jobs: dict[str, Callable[..., Any]] = {
        FLAT: partial(_save_and_change, FLAT),
        BY_NAME: partial(_save_and_change, BY_NAME),
        "kept": _save_and_keep_plans,
        "atomic": partial(_save_locally, "atomic"),
        "fully_parallel": partial(_save_locally, "fully_parallel"),
        "local": _fail_locally,
        "local, later": _fail_locally_later,
    }
    jobs |= {name: partial(_fail, name) for name in FAULTS}
    run = run_once(tmp_path_factory.mktemp("resiliency"), {2: jobs})
    return partial(run, 2)


@pytest.mark.parametrize("sharding", [FLAT, BY_NAME])
def test_its_asynchronous_writer_writes_the_values_of_the_call(sharding, found):
    assert all(found(sharding))


def test_its_writer_is_given_the_tensors_of_every_save_though_plans_are_kept(found):
    for kept, compared in found("kept"):
        assert kept == [False] * 3
        assert compared


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_names_the_rank_of_its_writer_that_failed(name, found):
    for rank, (said, defect) in enumerate(found(name)):
        assert FULL.strerror in said
        assert rank == FAULTS[name][0] or f"rank {FAULTS[name][0]}" in said
        assert defect is not None


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_a_local_checkpoint_restores_every_element(algo, found):
    assert all(found(algo))


def test_a_local_save_that_fails_on_one_rank_is_raised_on_all(found):
    (first, newest), (second, _) = found("local")
    assert f"rank 1: {FULL}" in first
    assert str(FULL) in second
    assert newest == -1


def test_an_asynchronous_local_save_that_fails_on_one_rank_is_raised_on_all(found):
    """When it is finalized; the iteration does not count as saved."""
    for said, newest in found("local, later"):
        assert "iteration 7" in said and f"rank 1: OSError: {FULL}" in said
        assert newest == -1
