"""Runs resume to the bit, and evaluations change nothing, where a stage trains nothing and where
fp32 parameters are masters."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.optimizer.test_fused_step import after_conversion, keep_routers_in_fp32_and_couple_decay
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain

pytestmark = pytest.mark.slow
FUSED = MoEOptimConfig(format="mxfp8_2d", step="fused")
NVFP4 = replace(FUSED, format="nvfp4")  # of which frozen experts load to the byte
RUN = ["--train-iters", "4", "--eval-interval", "1000000"]


def freeze_the_first_stage() -> None:
    if os.environ["RANK"] == "0":
        after_conversion(lambda module: module.requires_grad_(False))


def freeze_experts_of_the_second_layer() -> None:
    def freeze(module: torch.nn.Module) -> None:
        if hasattr(module, "mlp") and module.layer_number == 2:
            module.mlp.experts.requires_grad_(False)

    after_conversion(freeze)


def _train(flags: list[str], prepare: Callable[[], None]) -> Record:
    prepare()
    by_name = "--dist-ckpt-optim-fully-reshardable" in flags
    return pretrain(flags, NVFP4 if by_name else FUSED)


STAGES = ["--pipeline-model-parallel-size", "2"]
TORCH = ["--ckpt-format", "torch"]
BY_NAME = ["--expert-model-parallel-size", "2", "--dist-ckpt-optim-fully-reshardable"]
CASES = {
    "experts of a layer frozen, by name": (BY_NAME, freeze_experts_of_the_second_layer),
    "frozen": (STAGES, freeze_the_first_stage),
    "fp32, one file a rank": (TORCH, keep_routers_in_fp32_and_couple_decay),
}


@pytest.mark.parametrize(("flags", "prepare"), CASES.values(), ids=CASES.keys())
def test_they_resume_to_the_bit(flags, prepare, tmp_path: Path):
    flags = [*RUN, *flags]
    whole = run_ranks(2, _train, [*flags, "--save", f"{tmp_path}", "--save-interval", "2"], prepare)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    rest = run_ranks(2, _train, [*flags, "--load", f"{tmp_path}"], prepare)
    for got, want in zip(rest, whole, strict=True):
        losses = {step: want.losses[step] for step in got.losses}
        want = replace(want, losses=losses, validation_losses=got.validation_losses)
        assert_same_run(got, want, what="resumed")


VIRTUAL = [*STAGES, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]


def test_evaluations_change_nothing_of_fp32_parameters_in_virtual_stages():
    """Later virtual stages gather fp32 and bf16 buckets in one call, before evaluations at once."""
    flags = ["--train-iters", "4", *VIRTUAL, *OVERLAP, "--eval-interval"]
    with_evaluations = run_ranks(2, _train_routers_in_fp32, [*flags, "2"])
    without = run_ranks(2, _train_routers_in_fp32, [*flags, "1000000"])
    for got, want in zip(with_evaluations, without, strict=True):
        want = replace(want, validation_losses=got.validation_losses)
        assert_same_run(got, want, what="with evaluations")
    assert len(with_evaluations[-1].losses) == 4


def _train_routers_in_fp32(flags: list[str]) -> Record:
    keep_routers_in_fp32_and_couple_decay()
    return pretrain(flags, FUSED)
