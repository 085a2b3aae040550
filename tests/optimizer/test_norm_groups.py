"""Squares are added up over the ranks that share an optimizer, each norm for itself."""

import pytest
import torch
import torch.distributed as dist

from moe_optim.optimizer.chained import clip_factors
from tests.optimizer.test_read_anew import DENSE, LAST
from tests.support.ranks import run_ranks
from tests.support.states import life_cycle


def _norms_by_group() -> tuple[list[float], list[list[float]]]:
    """Return the norms that a step finds, and the squares of this rank: of its layers, each."""
    life_cycle.initialize()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    cycle = life_cycle.LifeCycle(step="fused")
    cycle.zero()
    cycle.micro(1, last=True)
    first, _ = cycle.optimizer.chained_optimizers
    first.grad_stats_parallel_group = alone  # of an optimizer that no other rank has
    squares = [0.0, 0.0, 0.0]
    for part in cycle.optimizer.chained_optimizers:
        for number, owned, _ in cycle._masters_of(part):
            gradient = cycle.params[number].main_grad.view(-1)[owned]
            squares[number] = float(gradient.double().square().sum())
    _, norms, _ = cycle.optimizer.find_norms()
    return norms, [squares]


def test_the_norm_of_each_group_is_over_the_ranks_of_its_optimizer():
    """The main norm is of an optimizer of this rank alone, that of the last layer of both ranks."""
    found = run_ranks(2, _norms_by_group)
    squares = [of_rank[1][0] for of_rank in found]
    last = sum(of_layer[LAST] for of_layer in squares)
    for (norms, _), of_rank in zip(found, squares, strict=True):
        assert norms[0] == pytest.approx((of_rank[0] + of_rank[DENSE]) ** 0.5, rel=1e-6)
        assert norms[1] == pytest.approx(last**0.5, rel=1e-6)
    assert found[0][0][0] != found[1][0][0]


def test_nothing_is_clipped_by_a_limit_of_zero_or_below():
    """Nor what Megatron does not clip by; a limit above zero scales what is larger."""
    norms = torch.tensor([4.0, 0.0, 0.25, 8.0])
    for limit in (0.0, -1.0):
        assert clip_factors(norms, limit).tolist() == [1.0] * 4
    expected = [0.5 / (4.0 + 1e-6), 1.0, 1.0, 1.0]
    found = clip_factors(norms, 0.5, [True, True, True, False])
    assert found.tolist() == torch.tensor(expected).tolist()
