"""A load of Megatron's that fails on one rank is raised on every rank, or on that one at once."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, StateError
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

pytestmark = pytest.mark.slow

CHECKPOINTING, CORE = "megatron.training.checkpointing", "megatron.core.dist_checkpointing"
ARGUMENTS = f"{CHECKPOINTING}.check_checkpoint_args"
FAULTS: dict[str, tuple[str, tuple[BaseException | None, BaseException]]] = {
    # what fails, where an agreement comes next, and the errors of both ranks
    "model": (
        "moe_optim.experts.module.GroupedExperts.sharded_state_dict",
        (None, ConfigError("the model is refused")),
    ),
    "random state": (
        f"{CHECKPOINTING}.tensor_parallel.get_cuda_rng_tracker",
        (None, MemoryError("no memory is left")),
    ),
    "exit": (ARGUMENTS, (None, SystemExit("the arguments are refused"))),
    "both": (ARGUMENTS, (ConfigError("one is refused"), MemoryError("no memory is left"))),
}
FOLDERS: dict[str, tuple[str | None, str]] = {
    # what rank 1 has as its tracker file in a folder of its own, and the error
    "no tracker": (None, "expected latest_checkpointed_iteration.txt on all ranks or on none"),
    "torn tracker": ("1x", "expected the iteration to load, got '1x'"),
    "no iteration": ("1", "iter_0000001"),
}
AFTER_READING = {  # what fails, and what the other rank hears
    # it does something else next, which no agreement answers, and the rank that fails ends
    "entries": (f"{CORE}.serialization.load_preprocess", "(?i)closed|reset"),
    "masters": ("moe_optim.checkpoint.model_values.model_values_for", "rank 1: MemoryError"),
}


class _LocalManager:
    """A manager of local checkpoints whose rank 1 cannot read its own."""

    def find_latest(self) -> int:
        return 5

    def load(self) -> tuple[dict[str, Any], str]:
        if torch.distributed.get_rank() == 1:
            raise ConfigError("the local file is refused")
        return {}, "5"


def _folder_of_a_node(folder: Path, tracker: str | None) -> Path:
    folder.mkdir()
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
    return folder


def _load(folder: Path, fails_last: str, chunks: list[Any], optimizer: Any) -> dict[str, str]:
    from megatron.training import training

    args, rank, said = training.get_args(), torch.distributed.get_rank(), {}
    args.load, args.no_load_optim = str(folder), True
    load = partial(training.load_checkpoint, chunks, optimizer, None)
    for name, (target, errors) in FAULTS.items():
        fails = errors[rank] is not None
        with (
            pytest.raises((ConfigError, MemoryError, StateError, SystemExit)) as raised,
            mock.patch(target, side_effect=errors[rank]) if fails else nullcontext(),
        ):
            load()
        said[name] = str(raised.value)
    for name, (tracker, _) in FOLDERS.items():
        if rank == 1:
            args.load = str(_folder_of_a_node(folder.with_name(name), tracker))
        with pytest.raises((OSError, StateError)) as raised:
            load()
        said[name], args.load = str(raised.value), str(folder)
    args.non_persistent_ckpt_type = "local"
    with pytest.raises(ConfigError) as raised:
        load(checkpointing_context={"local_checkpoint_manager": _LocalManager()})
    said["local file"], args.non_persistent_ckpt_type = str(raised.value), None
    assert load()[0] == 1
    args.load_main_params_from_ckpt = fails_last == "masters"
    target, heard = AFTER_READING[fails_last]
    if rank == 1:
        with mock.patch(target, side_effect=MemoryError), pytest.raises(MemoryError):
            load()
    else:
        with pytest.raises(RuntimeError, match=heard):
            load()
    return said


def _train_and_load(folder: Path, fails_last: str) -> dict[str, str]:
    flags = ["--train-iters", "1", "--eval-interval", "1000", "--save", str(folder)]
    config = MoEOptimConfig(format="mxfp8")
    return pretrain(flags, config, observe=partial(_load, folder, fails_last)).extra


@pytest.mark.parametrize("fails_last", AFTER_READING)
def test_what_fails_around_a_load_in_megatrons_loop_is_raised_on_every_rank(
    fails_last: str, tmp_path: Path
):
    """Or at once on the rank that fails, where the others would not hear of it."""
    first, second = run_ranks(2, _train_and_load, tmp_path / "run", fails_last, timeout_s=120)
    assert set(first) == set(second) == {*FAULTS, *FOLDERS, "local file"}
    for name, (_, error) in FOLDERS.items():
        assert error in first[name] and error in second[name]
    for name, (_, (mine, error)) in FAULTS.items():
        assert second[name] == str(error)
        assert first[name] == (f"rank 1: {error}" if mine is None else str(mine))
    assert second["local file"] == "the local file is refused"
    assert first["local file"] == "rank 1: the local file is refused"
