"""Runs resume to the bit where a stage trains nothing, and where fp32 parameters are masters."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moe_optim.config import MoEOptimConfig
from tests.megatron.optimizer.test_fused_step import (
    after_conversion,
    keep_routers_in_fp32_and_couple_decay,
)
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_run, pretrain

pytestmark = pytest.mark.slow
FUSED = MoEOptimConfig(format="mxfp8_2d", step="fused")
RUN = ["--train-iters", "4", "--eval-interval", "1000000"]


def freeze_the_first_stage() -> None:
    if os.environ["RANK"] == "0":
        after_conversion(lambda module: module.requires_grad_(False))


def _train(flags: list[str], prepare: Callable[[], None]) -> Record:
    prepare()
    return pretrain(flags, FUSED)


STAGES = ["--pipeline-model-parallel-size", "2"]
TORCH = ["--ckpt-format", "torch"]
CASES = {
    "frozen": (STAGES, freeze_the_first_stage),
    "fp32, one file a rank": (TORCH, keep_routers_in_fp32_and_couple_decay),
}
MORE = {
    "frozen, one file a rank": ([*STAGES, *TORCH], freeze_the_first_stage),
    "fp32": ([], keep_routers_in_fp32_and_couple_decay),
}


@pytest.mark.parametrize(
    ("flags", "prepare"),
    [pytest.param(*case, id=name) for name, case in CASES.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.extended) for name, case in MORE.items()],
)
def test_they_resume_to_the_bit(flags, prepare, tmp_path: Path):
    flags = [*RUN, *flags]
    whole = run_ranks(2, _train, flags, prepare)
    run_ranks(2, _train, [*flags, "--save", f"{tmp_path}", "--exit-interval", "2"], prepare)
    rest = run_ranks(2, _train, [*flags, "--load", f"{tmp_path}"], prepare)
    for got, want in zip(rest, whole, strict=True):
        losses = {step: want.losses[step] for step in got.losses}
        want = replace(want, losses=losses, validation_losses=got.validation_losses)
        assert_same_run(got, want, what="resumed")
