"""A save that fails on one rank is raised on every rank, and costs that save and nothing else."""

import builtins
import errno
import io
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.integrity import checkpoint_defect, corrupt_files
from moe_optim.checkpoint.saving import _collect, _forget_other_plans, writing_together
from moe_optim.commands.train.run_folder import find_resume_point
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError, NonFiniteError, StateError
from tests.support.checkpoints.checkpoint_journey import Journey, Station, run_once
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

GROUPED = Station()
RANK = torch.distributed.get_rank
FLAT, BY_NAME = "dp_reshardable", "fully_reshardable"
LATER = {"async_sharded_save": True, "async_strategy": "mcore"}
HANGS_S = 240
CHECKPOINTING = "megatron.training.checkpointing"
MODULE = "megatron.core.transformer.module.MegatronModule"

type Fault = Callable[[], AbstractContextManager[Any]]


@contextmanager
def full_disk(name: str) -> Iterator[None]:
    """Let no file whose name ends in ``name`` be opened for writing."""
    stock = io.open

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and str(path).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return stock(path, mode, *args, **kwargs)

    with mock.patch.object(io, "open", open_file), mock.patch.object(builtins, "open", open_file):
        yield


@contextmanager
def small_files() -> Iterator[None]:
    """Let the kernel refuse what lies beyond the first 100,000 bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def raising(target: str, error: Exception) -> Fault:
    return partial(mock.patch, target, side_effect=error)


MEMORY = MemoryError("no host memory is left")
REFUSED = LayoutError("these states are refused")
STAGING = "moe_optim.checkpoint.staging._on_host"
COPY = "moe_optim.checkpoint.staging._copied"
STATES = "moe_optim.checkpoint.{}.flat_states"
SHARDS = "megatron.core.dist_checkpointing.validation._validate_sharding_for_key"
FILES = "megatron.core.dist_checkpointing.strategies.filesystem_async._split_by_size_and_type"
BUILD = "megatron.core.dist_checkpointing.mapping.ShardedTensorFactory.build"
RESULTS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async."
    "FileSystemWriterAsync.retrieve_write_results"
)
FULL, LARGE = os.strerror(errno.ENOSPC), os.strerror(errno.EFBIG)
NO_FILE = (partial(full_disk, ".distcp"), FULL)

FAULTS: dict[str, tuple[int, str, dict[str, Any], Fault, str]] = {
    # rank that fails, sharding type, how it saves, what fails, and what is said of it
    "states by name": (1, BY_NAME, {}, raising(STATES.format("owned_boxes"), REFUSED), "refused"),
    "flat states": (1, FLAT, {}, raising(STATES.format("flat_states"), REFUSED), "refused"),
    "an entry": (1, BY_NAME, {}, raising(BUILD, MEMORY), "memory"),
    "an object": (1, BY_NAME, {}, raising("torch.save", MEMORY), "memory"),
    "what covers a tensor": (0, BY_NAME, {}, raising(SHARDS, REFUSED), "refused"),
    "a copy, later": (1, BY_NAME, LATER, raising(COPY, MEMORY), "memory"),
    "a value": (1, BY_NAME, {}, raising(STAGING, MEMORY), "memory"),
    "a file": (1, BY_NAME, {}, *NO_FILE),
    "the end of a file": (1, BY_NAME, {}, small_files, LARGE),
    "one of several files": (1, BY_NAME, {"threads": 2}, partial(full_disk, "1_1.distcp"), FULL),
    "what was written, later": (1, BY_NAME, LATER, raising(RESULTS, EOFError()), "EOFError"),
    ".metadata": (0, BY_NAME, {}, partial(full_disk, ".metadata.tmp"), FULL),
    "the checksums": (0, BY_NAME, {}, partial(full_disk, "seal.json.partial"), FULL),
    "metadata.json": (0, BY_NAME, {}, partial(full_disk, "metadata.json"), FULL),
    "Megatron's checksums": (
        0, BY_NAME, {"verify_integrity": True}, partial(full_disk, "integrity.json"), FULL,
    ),
}  # fmt: skip


def _save(journey: Journey, folder: Path, sharding: str, threads: int = 1, **more: Any) -> None:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy(thread_count=threads)
    request = journey.save(folder, sharding, sharded_strategy=strategy, **more)
    if request is not None:
        request.execute_sync()


type Failed = tuple[str, str | None, int]
"""What a failing save raised, why its checkpoint is incomplete, and how many elements of the
checkpoint that was saved in its place were compared."""


def _fail_in_turn(folder: Path) -> dict[str, Failed]:
    """Save once, then fail to save one iteration after another in all ways, and save each again."""
    journey, first = Journey(GROUPED).fill(), folder / "iter_0000001"
    _save(journey, first, BY_NAME)
    return {name: _fail(name, journey, first, folder / name) for name in FAULTS}


def _fail(name: str, journey: Journey, first: Path, second: Path) -> Failed:
    rank, sharding, how, fault, _ = FAULTS[name]
    said = "saved"
    try:
        with fault() if torch.distributed.get_rank() == rank else nullcontext():
            _save(journey, second, sharding, **how)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    torch.distributed.barrier()
    defect = checkpoint_defect(second) if second.exists() else "not there"
    assert list(corrupt_files(first)) == []
    torch.distributed.barrier()
    _save(journey, second, sharding, **how)
    return said, defect, journey.scramble().load(second).check()


def _fail_while_plans_are_kept(folder: Path) -> int:
    """Plan saves once, as for ``--ckpt-assume-constant-structure``; one rank fails in the second.

    Returns how many elements of the last checkpoint were compared.
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy(cached_metadata=True)
    journey = Journey(GROUPED).fill()
    for number in range(1, 6):
        fails = number == 2 and torch.distributed.get_rank() == 1
        with (
            pytest.raises((MemoryError, StateError)) if number == 2 else nullcontext(),
            raising(FILES, MEMORY)() if fails else nullcontext(),
        ):
            journey.save(folder / str(number), BY_NAME, sharded_strategy=strategy)
    return Journey(GROUPED).scramble().load(folder / str(number)).check()


def _fail_between_plan_and_cache(folder: Path) -> int:
    """As above; one rank fails once all have planned, when it alone has not kept the plan."""
    from megatron.core.dist_checkpointing.strategies import state_dict_saver
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    stock = state_dict_saver.save_state_dict_async_plan

    def plan(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        raise MEMORY

    strategy = TorchDistSaveShardedStrategy(cached_metadata=True)
    journey = Journey(GROUPED).fill()
    for number in range(1, 5):
        fails = number == 2 and torch.distributed.get_rank() == 1
        with (
            pytest.raises((MemoryError, StateError)) if number == 2 else nullcontext(),
            mock.patch.object(state_dict_saver, stock.__name__, plan) if fails else nullcontext(),
        ):
            journey.save(folder / str(number), BY_NAME, sharded_strategy=strategy)
    return Journey(GROUPED).scramble().load(folder / str(number)).check()


def _change_while_plans_are_kept(folder: Path) -> list[Any]:
    """Plan saves once, as above; one rank adds an entry to the second save, and others change.

    Returns the saved values of the entry, and how many elements of later stations were compared.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    found: list[Any] = []
    journey = Journey(GROUPED).fill()  # installs
    kept = TorchDistSaveShardedStrategy(cached_metadata=True)
    for name, strategy in (
        ("alone", kept),
        ("in parallel", FullyParallelSaveStrategyWrapper(kept, None, True)),
    ):
        for number in range(1, 5):
            where = folder / name / str(number)
            state = {"a": ShardedTensor.from_rank_offsets("a", torch.ones(8), replica_id=RANK())}
            if number > 1 and RANK() == 1:
                state["added"] = ShardedTensor.from_rank_offsets("added", torch.ones(8) * number)
            if RANK() == 0:
                where.mkdir(parents=True)
            torch.distributed.barrier()
            dist_checkpointing.save(state, str(where), strategy, number == 1)
            stored = TorchDistReader(where)
            found.append(stored.read("added").tolist() if "added" in stored.tensors else [])
    journey.save(folder / "grouped", BY_NAME, sharded_strategy=kept)
    Journey(GROUPED.but(ep=2)).fill().save(folder / "sharded", BY_NAME, sharded_strategy=kept)
    for name in ("grouped", "sharded"):
        found.append(Journey(GROUPED).scramble().load(folder / name).check())
    return found


def _fail_on_many_ranks(folder: Path) -> str:
    """Return the error of a save of which 1,000 ranks could not write their files."""

    def collect() -> None:
        raise CheckpointException("write", {rank: (OSError(FULL), None) for rank in range(1000)})

    with pytest.raises(StateError) as raised:
        _collect([collect], str(folder))
    return str(raised.value)


class _Request(NamedTuple):
    """A request of nvidia-resiliency-ext."""

    async_fn: Callable[..., None]
    finalize_fns: list[Callable[[], None]]


class _LocalManager:
    """Saves local checkpoints as that of nvidia-resiliency-ext does."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def write(self, states: str) -> None:
        if self._fails:
            raise OSError(errno.ENOSPC, f"{FULL}: {states}")

    def save(self) -> _Request:
        return _Request(self.write, [self._finalize])

    def _finalize(self) -> None:
        raise RuntimeError("iteration 7 is not there")


def _fail_in_a_local_writer(folder: Path) -> str:
    """Return the error of a local save whose writer, a process of its own, fails on one rank."""
    manager = _LocalManager(torch.distributed.get_rank() == 1)
    with writing_together(manager, is_synchronous=False):
        request = manager.save()
    writer = multiprocessing.get_context("fork").Process(
        target=request.async_fn, args=[str(folder)]
    )
    writer.start()
    writer.join()
    with pytest.raises(StateError) as raised:
        for finalize in request.finalize_fns:
            finalize()
    return str(raised.value)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of ranks and a name, which gives what these ranks found."""
    jobs = {
        "in turn": _fail_in_turn,
        "kept plans": _fail_while_plans_are_kept,
        "many ranks": _fail_on_many_ranks,
        "a plan of one rank": _fail_between_plan_and_cache,
        "other entries": _change_while_plans_are_kept,
        "a local writer": _fail_in_a_local_writer,
    }
    found = run_once(tmp_path_factory.mktemp("failed"), {2: jobs}, timeout_s=HANGS_S)
    found(2, "in turn")  # all at once; hangs once, not in every test
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_names_the_rank_that_failed_and_its_error(failed, name):
    rank, *_, says = FAULTS[name]
    for number, of_rank in enumerate(failed(2, "in turn")):
        said, _, _ = of_rank[name]
        assert says in said
        assert number == rank or f"rank {rank}" in said


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_failed_save_leaves_is_incomplete_and_the_next_save_is_not(failed, name):
    for of_rank in failed(2, "in turn"):
        _, defect, compared = of_rank[name]
        assert defect is not None
        assert compared


@pytest.mark.parametrize("name", ["kept plans", "a plan of one rank"])
def test_plans_that_ranks_keep_agree_after_a_save_that_one_of_them_failed(name, failed):
    assert all(failed(2, name))


def test_what_was_not_there_when_plans_were_kept_is_saved(failed):
    """Megatron saves what ``--ckpt-assume-constant-structure`` has planned, and nothing else."""
    for alone_and_in_parallel in failed(2, "other entries"):
        *added, grouped, sharded = alone_and_in_parallel
        assert added == [[], [2.0] * 8, [3.0] * 8, [4.0] * 8] * 2
        assert grouped and sharded


def test_a_strategy_of_ones_own_keeps_no_plans():
    """Megatron's wrapper takes any."""
    assert not _forget_other_plans(SimpleNamespace(base_strategy=object()), {})


def test_an_error_of_many_ranks_names_eight_of_them_and_counts_the_others(failed):
    for said in failed(2, "many ranks"):
        assert "rank 7: " in said
        assert "rank 8: " not in said
        assert "and 992 more" in said


def test_an_error_of_the_writer_of_a_local_checkpoint_is_raised_in_every_trainer(failed):
    for said in failed(2, "a local writer"):
        assert "iteration 7 is not there: " in said and f"{FULL}: " in said
        assert "rank 1: " in said and "rank 0: " not in said


AROUND = {
    # what fails around a save of each format, on which rank, and how
    "torch_dist": {
        "model": (1, "moe_optim.experts.module.GroupedExperts.sharded_state_dict", ConfigError),
        "folder": (0, f"{CHECKPOINTING}.ensure_directory_exists", OSError),
        "tracker": (0, f"{CHECKPOINTING}.get_checkpoint_tracker_filename", OSError),
    },
    "torch": {
        "model": (1, f"{MODULE}.state_dict_for_save_checkpoint", MemoryError),
        "folder": (1, f"{CHECKPOINTING}.ensure_directory_exists", OSError),
        "file": (1, "torch.save", OSError),
        "first file": (0, "torch.save", OSError),
        "tracker": (0, f"{CHECKPOINTING}.get_checkpoint_tracker_filename", OSError),
    },
}


def _train(folder: Path, form: str) -> dict[str, str]:
    """Train two iterations; the save of the second fails before it succeeds, in several ways."""
    from megatron.training import training

    said = {}

    def save(stock: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        for name, (rank, target, error) in AROUND[form].items() if iteration == 2 else ():
            fails = torch.distributed.get_rank() == rank
            fault = raising(target, error(f"the {name} is refused"))() if fails else nullcontext()
            try:
                with fault:
                    stock(iteration, *args, **kwargs)
            except Exception as caught:
                said[name] = str(caught)
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:  # it mends the tracker
                is_complete = (form, name) == ("torch_dist", "tracker")
                assert find_resume_point(folder).iteration == (2 if is_complete else 1)
            torch.distributed.barrier()
        stock(iteration, *args, **kwargs)

    def replace_save(*_: Any) -> None:
        training.save_checkpoint = partial(save, training.save_checkpoint)

    flags = ["--train-iters", "2", "--eval-interval", "1000", "--save-interval", "1"]
    flags += ["--ckpt-format", form, "--expert-model-parallel-size", "2"]
    config = MoEOptimConfig(format="mxfp8")
    pretrain([*flags, "--save", str(folder)], config, after_setup=replace_save)
    return said


@pytest.mark.parametrize("form", AROUND)
def test_what_fails_around_a_save_in_megatrons_loop_is_raised_on_every_rank(
    form: str, tmp_path: Path
):
    """A model that cannot be saved, a folder that cannot be made, a file that is not written."""
    folder = tmp_path / "checkpoints"
    of_ranks = run_ranks(2, _train, folder, form, timeout_s=HANGS_S)
    for name, (rank, _, _) in AROUND[form].items():
        assert f"the {name} is refused" in of_ranks[rank][name]
        assert of_ranks[1 - rank][name] == f"rank {rank}: {of_ranks[rank][name]}"
    assert find_resume_point(folder).iteration == 2


def _save_infinity(folder: Path) -> str:
    """Save a master of the last pipeline stage that is not finite, and return what was said."""

    def spoil(_: int, __: list[Any], optimizer: Any) -> None:
        if RANK() == 1:
            masters = [group["params"] for group in optimizer.stepping[0].optimizer.param_groups]
            masters[0][0].data.view(-1)[0] = torch.inf

    flags = ["--train-iters", "1", "--eval-interval", "1000", "--save-interval", "1"]
    flags += ["--ckpt-format", "torch", "--pipeline-model-parallel-size", "2"]
    with pytest.raises(NonFiniteError) as raised:
        pretrain([*flags, "--save", str(folder)], MoEOptimConfig(format="mxfp8"), after_step=spoil)
    return str(raised.value)


def test_a_state_that_is_not_finite_stops_a_save_to_files_of_ranks_on_every_stage(tmp_path: Path):
    """Others would wait for its data-parallel group at Megatron's barrier."""
    first, second = run_ranks(2, _save_infinity, tmp_path, timeout_s=HANGS_S)
    assert second.startswith(
        "masters and moments: expected finite values, got data-parallel rank 0"
    )
    assert first == f"rank 1: {second}"
