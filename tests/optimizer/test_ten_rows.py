"""Five ways to store and multiply experts, with weight gradients fused or not: in each of these ten
rows the parameters may be cut in either way, and evaluations may come between steps, to the bit."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP, Record, assert_same_run, assert_same_tensors, pretrain

pytestmark = pytest.mark.slow

FORMATS = {
    "bf16": MoEOptimConfig(format="bf16"),
    "bf16, products in mxfp8": MoEOptimConfig(format="bf16", compute="mxfp8"),
    "bf16, products in nvfp4": MoEOptimConfig(format="bf16", compute="nvfp4"),
    "mxfp8": MoEOptimConfig(format="mxfp8"),
    "nvfp4": MoEOptimConfig(format="nvfp4"),
}
REPEATED = {"bf16, products in mxfp8"}  # its products are those of nvfp4's row in another format
LATER = {name: [pytest.mark.extended] * (name in REPEATED) for name in FORMATS}
ROWS = [
    pytest.param(
        replace(config, fuse_wgrad_accumulation=fused), id=f"{name}, {accumulation}", marks=marks
    )
    for name, config in FORMATS.items()
    for fused, accumulation, marks in (
        (True, "fused", LATER[name]),
        (False, "through autograd", pytest.mark.extended),
    )
]
FLAGS = ["--train-iters", "3", *OVERLAP]
NEVER = 1_000_000


@cache
def train(config: MoEOptimConfig, evaluate_every: int = NEVER) -> list[Record]:
    """Return what both ranks saw of 3 steps, evaluated at the end, too, or not at all."""
    return run_ranks(2, pretrain, [*FLAGS, "--eval-interval", f"{evaluate_every}"], config)


@pytest.mark.parametrize("config", ROWS)
def test_indexed_equals_grouped(config: MoEOptimConfig):
    """Losses, and the bytes of all weights. Unclipped: a norm sums by parameter."""
    indexed = train(replace(config, expert_layout="indexed"), evaluate_every=2)
    for got, want in zip(indexed, train(config, evaluate_every=2), strict=True):
        assert len(want.losses) == 3 and len(want.validation_losses) == 2
        assert got.losses == want.losses
        assert got.validation_losses == want.validation_losses
        assert got.weights.keys().isdisjoint(experts_of(want.weights))
        assert_same_tensors(by_expert(got.weights), by_expert(want.weights), what="indexed")


@pytest.mark.parametrize("config", ROWS)
def test_train_eval_train_equals_train_only(config: MoEOptimConfig):
    """Losses, masters, moments and weights."""
    evaluated = train(config, evaluate_every=2)
    for between, only in zip(evaluated, train(config), strict=True):
        assert len(between.validation_losses) > len(only.validation_losses)
        # every evaluation reads on in the validation data
        between = replace(between, validation_losses=only.validation_losses)
        assert_same_run(between, only, what="evaluated between")


@pytest.mark.parametrize(
    "config", [pytest.param(one, id=name, marks=LATER[name]) for name, one in FORMATS.items()]
)
def test_wgrad_through_autograd_equals_fused(config: MoEOptimConfig):
    """Losses, masters, moments and weights."""
    unfused = train(replace(config, fuse_wgrad_accumulation=False))
    for got, want in zip(unfused, train(config), strict=True):
        assert_same_run(got, want, what="through autograd")


EXPERT_WEIGHT = re.compile(r"(.+\.experts\.linear_fc[12]\.weight)(\d*)(|\..+)")


def experts_of(weights: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of what belongs to experts."""
    return {name for name in weights if EXPERT_WEIGHT.fullmatch(name)}


def by_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return every buffer, or the bf16 values, of each expert apart, and all else as it is.

    A buffer leads with the experts: all of them, or one. bf16 values do so if they are of all.
    """
    found = {name: weights[name] for name in weights.keys() - experts_of(weights)}
    for name in experts_of(weights):
        weight, index, buffer = EXPERT_WEIGHT.fullmatch(name).groups()
        of_experts = weights[name].unsqueeze(0) if index and not buffer else weights[name]
        for expert, tensor in enumerate(of_experts, start=int(index or 0)):
            found[f"{weight}{expert}{buffer}"] = tensor
    return found
