"""What a fused step has planned is used while it is true, and not longer."""

import pytest

from moe_optim.errors import LayoutError
from moe_optim.modules.grouped_weight import GroupedWeight
from tests.support import life_cycle
from tests.support.ranks import run_ranks


def _train(cycle: life_cycle.LifeCycle, seed: int) -> None:
    cycle.zero()
    cycle.micro(seed, last=True)
    cycle.step()
    cycle.check()


def _step_refused_twice() -> None:
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(step="fused")
    _train(cycle, 0)
    states = [
        state
        for part in cycle.optimizer.chained_optimizers
        for state in (*part.optimizer.state.values(),)
    ]
    moments = [state["exp_avg"] for state in states]
    for state, moment in zip(states, moments, strict=True):
        state["exp_avg"] = moment.half()
    for seed in (1, 2):
        cycle.zero()
        cycle.micro(seed, last=True)
        with pytest.raises(LayoutError, match=r"expected an fp32 master.*torch\.float16"):
            cycle.optimizer.step()
        cycle.expected.stale.add(0)  # of the part that has begun
        cycle.expected.must_zero = True
        cycle.check()
    for state, moment in zip(states, moments, strict=True):
        state["exp_avg"] = moment
    _train(cycle, 3)
    cycle.rollout(3)


def test_a_step_whose_plan_was_refused_has_not_been_taken():
    """However often it is tried; it does not count, and goes on where nothing is refused."""
    run_ranks(1, _step_refused_twice)


def _rebuild_and_count() -> int:
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(step="fused")
    _train(cycle, 0)
    updates = [part.update for part in cycle.optimizer.chained_optimizers]
    planned = [dict(update._tables) for update in updates]
    for seed in (1, 2):
        _train(cycle, seed)
        cycle.rollout(seed)
    assert [update._tables for update in updates] == planned
    return sum(isinstance(param, GroupedWeight) for param in cycle.params)


def test_steps_in_which_nothing_moves_plan_nothing():
    assert run_ranks(1, _rebuild_and_count) == [2]
