"""Training bf16 experts whose products read the values of a grid, and where such experts lie."""

from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.operands import lie_together
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP, Record, pretrain

STEPS = ["--train-iters", "3", "--eval-interval", "2"]
RUNS = {
    "grouped": (MoEOptimConfig(format="bf16", compute="int8_per_expert"), []),
    "indexed": (
        MoEOptimConfig(format="bf16", compute="int8_per_expert", expert_layout="indexed"),
        OVERLAP,
    ),
    "plain": (MoEOptimConfig(format="bf16", expert_layout="indexed"), OVERLAP),
}


def _places(model: list[Any], _: Any) -> list[tuple[bool, bool]]:
    """Return of every linear of experts whether its weights lie in a buffer, and side by side."""
    buffers = [buffer.param_data for buffer in model[0].expert_parallel_buffers]
    buffers += [buffer.param_data for buffer in model[0].buffers]
    places = []
    for module in model[0].modules():
        if isinstance(module, GroupedLinear):
            inside = all(
                any(b.data_ptr() <= w.data_ptr() < b.data_ptr() + b.nbytes for b in buffers)
                for w in module.weights()
            )
            places.append((inside, lie_together(module.weights())))
    return places


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Record]]:
    return {
        name: run_ranks(2, pretrain, [*STEPS, *overlap], config, True, _places)
        for name, (config, overlap) in RUNS.items()
    }


def test_losses_on_a_grid_do_not_depend_on_the_layout_of_parameters(runs):
    for mine, theirs in zip(runs["indexed"], runs["grouped"], strict=True):
        assert len(mine.losses) == 3 and mine.validation_losses
        assert mine.losses == theirs.losses
        assert mine.validation_losses == theirs.validation_losses


def test_losses_on_a_grid_are_not_those_of_bf16(runs):
    for mine, plain in zip(runs["indexed"], runs["plain"], strict=True):
        assert mine.losses != plain.losses


@pytest.mark.parametrize("run", ["indexed", "plain"])
def test_experts_of_their_own_lie_side_by_side_in_the_buffers_of_ddp(run, runs):
    """So that no forward product copies them."""
    for record in runs[run]:
        assert record.extra == [(True, True)] * 4
