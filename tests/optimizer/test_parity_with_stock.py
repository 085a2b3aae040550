"""With bf16 experts and Megatron's layout, the plug-in changes nothing but the classes."""

from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain

BF16 = MoEOptimConfig(format="bf16", layout="stock")
RUN = ["--train-iters", "6", "--eval-interval", "2"]  # evaluates after 2 and 4, and at the end


def _train(flags: list[str], plugin: bool, save: str) -> Record:
    return pretrain([*flags, "--save", save, "--save-interval", "3"], BF16, optimizer=plugin)


@pytest.mark.parametrize(
    ("overlap", "clip_grad"),
    [pytest.param([], "0", marks=pytest.mark.extended), (OVERLAP, "1.0")],
    ids=["no overlap", "overlap, clipped"],
)
def test_plugin_with_bf16_experts_equals_stock(overlap: list[str], clip_grad: str, tmp_path: Any):
    """Losses, masters, moments and weights are Megatron's to the bit: 6 steps, 3 evaluations, a
    save in the middle, on 2 data-parallel ranks."""
    flags = [*RUN, *overlap, "--clip-grad", clip_grad]
    stock = run_ranks(2, _train, flags, False, str(tmp_path / "stock"))
    ours = run_ranks(2, _train, flags, True, str(tmp_path / "ours"))
    for rank in range(2):
        assert stock[rank].classes == {"DistributedOptimizer"}
        assert ours[rank].classes == {"GroupedDistributedOptimizer"}
        assert len(ours[rank].losses) == 6
        assert len(ours[rank].validation_losses) >= 2
        assert_same_run(ours[rank], stock[rank], what=f"rank {rank}")
