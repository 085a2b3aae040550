"""Norms of gradients of Muon, whose own optimizer in Megatron counts experts twice."""

import shlex

import pytest

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import Record, pretrain
from tests.support.training_runs.stock_muon import gather_uneven_parts

pytestmark = pytest.mark.slow

FLAGS = shlex.split("""
--train-iters 1 --eval-interval 2 --clip-grad 1000
--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1
""")
"""One data-parallel rank of dense weights, and two of experts."""
BF16 = MoEOptimConfig(format="bf16", expert_layout="indexed", step="stock")


def _train(optimizer: str, is_ours: bool) -> Record:
    gather_uneven_parts()
    return pretrain(["--optimizer", optimizer, *FLAGS], BF16, optimizer=is_ours)


def test_each_expert_counts_once_in_the_norm():
    """Muon's norm is that of stock's Adam."""
    adam = run_ranks(2, _train, "adam", False)[0]
    ours = run_ranks(2, _train, "muon", True)[0]
    assert ours.norms[1] == pytest.approx(adam.norms[1], rel=1e-6)
