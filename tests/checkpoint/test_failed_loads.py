"""A load of Megatron's that fails on one rank is raised on every rank, or on that one at once."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

pytestmark = pytest.mark.slow

CHECKPOINTING, CORE = "megatron.training.checkpointing", "megatron.core.dist_checkpointing"
FAULTS = {  # what fails on rank 1, where the other's next collective is an agreement
    "model": "moe_optim.experts.module.GroupedExperts.sharded_state_dict",
    "arguments": f"{CHECKPOINTING}.check_checkpoint_args",
    "random state": f"{CHECKPOINTING}.tensor_parallel.get_cuda_rng_tracker",
}
ALONE = {  # what fails where the other rank does something else next, which no agreement answers
    "entries": f"{CORE}.serialization.load_preprocess",
    "masters": "moe_optim.checkpoint.model_values.model_values_for",
}


class _LocalManager:
    """A manager of local checkpoints whose rank 1 cannot read its own."""

    def find_latest(self) -> int:
        return 5

    def load(self) -> tuple[dict[str, Any], str]:
        if torch.distributed.get_rank() == 1:
            raise ConfigError("the local file is refused")
        return {}, "5"


def _load(folder: Path, alone: str, chunks: list[Any], optimizer: Any) -> dict[str, str]:
    from megatron.training import training

    args, said = training.get_args(), {}
    args.load, args.no_load_optim = str(folder), True
    for name, target in FAULTS.items():
        fails = torch.distributed.get_rank() == 1
        error = ConfigError(f"the {name} is refused")
        try:
            with mock.patch(target, side_effect=error) if fails else nullcontext():
                training.load_checkpoint(chunks, optimizer, None)
        except Exception as caught:
            said[name] = str(caught)
        torch.distributed.barrier()
    args.non_persistent_ckpt_type = "local"
    with pytest.raises(ConfigError) as raised:
        context = {"local_checkpoint_manager": _LocalManager()}
        training.load_checkpoint(chunks, optimizer, None, checkpointing_context=context)
    said["local file"], args.non_persistent_ckpt_type = str(raised.value), None
    assert training.load_checkpoint(chunks, optimizer, None)[0] == 1
    args.load_main_params_from_ckpt = alone == "masters"
    fault = mock.patch(ALONE[alone], side_effect=MemoryError)
    if torch.distributed.get_rank() == 1:
        with fault, pytest.raises(MemoryError):
            training.load_checkpoint(chunks, optimizer, None)
    else:
        with pytest.raises(RuntimeError, match="(?i)closed|reset"):  # once that rank has ended
            training.load_checkpoint(chunks, optimizer, None)
    return said


def _train_and_load(folder: Path, alone: str) -> dict[str, str]:
    flags = ["--train-iters", "1", "--eval-interval", "1000", "--save", str(folder)]
    run = pretrain(
        flags,
        MoEOptimConfig(format="mxfp8"),
        observe=partial(_load, folder, alone),
    )
    return run.extra


@pytest.mark.parametrize("alone", ALONE)
def test_what_fails_around_a_load_in_megatrons_loop_is_raised_on_every_rank(
    alone: str, tmp_path: Path
):
    """Or at once on the rank that fails, where the others would not hear of it."""
    first, second = run_ranks(2, _train_and_load, tmp_path, alone, timeout_s=120)
    assert set(first) == set(second) == {*FAULTS, "local file"}
    for name in first:
        assert second[name] == f"the {name} is refused"
        assert first[name] == f"rank 1: the {name} is refused"
