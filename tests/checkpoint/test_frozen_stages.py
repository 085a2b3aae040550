"""Checkpoints of models with a pipeline stage that trains nothing, so that ranks own no state."""

from pathlib import Path
from typing import Any

import pytest

from moe_optim.checkpoint.files.folders import TRACKER
from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.states import given_values
from tests.support.training import Record, assert_same_run, pretrain

pytestmark = pytest.mark.slow

RUN = ["--pipeline-model-parallel-size", "2", "--eval-interval", "1000", "--train-iters", "4"]
BY_NAME = "--dist-ckpt-optim-fully-reshardable"
CASES = {
    "states by name": (4, ["--expert-model-parallel-size", "2", BY_NAME]),
    "states by name of Muon": (2, ["--optimizer", "muon", BY_NAME]),
    "flat states": (2, []),
    "files of ranks": (2, ["--ckpt-format", "torch"]),
}
"""Ranks and flags. Two optimizers on each rank, one, and files that Megatron gathers."""


def _freeze_first_stage(model: Any) -> None:
    if model.pre_process:
        model.requires_grad_(False)


def _train(flags: list[str]) -> Record:
    given_values.when_built(_freeze_first_stage)
    return pretrain([*RUN, *flags], MoEOptimConfig(format="bf16"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extended] * (name != "states by name"))
        for name in CASES
    ],
)
def test_ranks_without_states_save_and_resume_to_the_bit(name: str, tmp_path: Path):
    ranks, flags = CASES[name]
    save = [*flags, "--save", str(tmp_path)]
    whole = run_ranks(ranks, _train, [*save, "--save-interval", "2"])
    (tmp_path / TRACKER).write_text("2")
    resumed = run_ranks(ranks, _train, [*flags, "--load", str(tmp_path)])
    assert not whole[0].masters and whole[-1].masters
    for got, want in zip(resumed, whole, strict=True):
        want.losses = {step: loss for step, loss in want.losses.items() if step > 2}
        assert_same_run(got, want, what=name)
