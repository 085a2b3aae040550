"""What a fused step has planned is used while it is true, and not longer."""

from typing import Any

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.kernels.step_table import StepTable
from moe_optim.optimizer.chained import GraphedStep
from moe_optim.weights.grouped_weight import GroupedWeight
from tests.optimizer.test_nonfinite import _snapshot
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states import life_cycle


def _train(cycle: life_cycle.LifeCycle, seed: int) -> None:
    cycle.zero()
    cycle.micro(seed, last=True)
    cycle.step()
    cycle.check()


def _step_refused_twice() -> None:
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


def test_a_step_whose_plan_was_refused_has_not_been_taken(found):
    """However often it is tried; it does not count, and goes on where nothing is refused."""
    assert "_step_refused_twice" in found


def _rebuild_and_count() -> int:
    cycle = life_cycle.LifeCycle(step="fused")
    _train(cycle, 0)
    parts = cycle.optimizer.chained_optimizers
    planned = [dict(part._tables) for part in parts]
    for seed in (1, 2):
        _train(cycle, seed)
        cycle.rollout(seed)
    assert [part._tables for part in parts] == planned
    return sum(isinstance(param, GroupedWeight) for param in cycle.params)


def test_steps_in_which_nothing_moves_plan_nothing(found):
    assert found["_rebuild_and_count"] == 2


def _exchange_unmanaged_masters() -> list[tuple[int, int]]:
    cycle = life_cycle.LifeCycle(step="fused")
    _train(cycle, 0)
    parts = cycle.optimizer.chained_optimizers
    before = [part._plans for part in parts]
    for _, master in (pair for part in parts for pair in part.book.unmanaged):
        master.data = master.data.clone()
    _train(cycle, 1)
    after = [part._plans for part in parts]
    counts = [len(part.book.unmanaged) for part in parts]
    return [(count, new - old) for count, old, new in zip(counts, before, after, strict=True)]


def test_unmanaged_masters_that_lie_elsewhere_are_planned_anew(found):
    """By the optimizer that has some, and by no other."""
    assert found["_exchange_unmanaged_masters"] == [(1, 1), (0, 0)]


def _counts(cycle: life_cycle.LifeCycle) -> list[int]:
    return [group["step"] for group in cycle.optimizer.param_groups]


def _fail(where: str) -> tuple[list[int], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return counts after two steps and one that fails, states then, and after a fourth step."""
    cycle = life_cycle.LifeCycle(step="fused")
    for seed in (1, 2):
        _train(cycle, seed)
    if where != "nowhere":
        cycle.zero()
        cycle.micro(3, last=True)
        take_step = GraphedStep(cycle.optimizer) if "graph" in where else cycle.optimizer.step
        launch = StepTable.launch

        def failing(table: StepTable) -> None:
            if "behind" in where:
                launch(table)
            raise life_cycle.Tripped

        StepTable.launch = failing
        with pytest.raises(life_cycle.Tripped):
            take_step()
        StepTable.launch = launch
    counts, states = _counts(cycle), _snapshot([cycle.ddp], cycle.optimizer)
    cycle.zero()
    cycle.micro(4, last=True)
    cycle.optimizer.step()
    return counts, states, _snapshot([cycle.ddp], cycle.optimizer)


WHERE = ("nowhere", "in a launch", "in a graph", "behind the masters")


def _fail_everywhere() -> dict[str, Any]:
    return {where: _fail(where) for where in WHERE}


@pytest.mark.parametrize("where", ["in a launch", "in a graph"])
def test_a_launch_that_fails_before_anything_is_written_does_not_count(found, where: str):
    """The steps after it have the bias corrections that they would have without it."""
    counts, states, after = found["_fail_everywhere"][where]
    _, expected, expected_after = found["_fail_everywhere"]["nowhere"]
    assert counts == [2, 2]
    assert_same_tensors(states, expected, what="states")
    assert_same_tensors(after, expected_after, what="after the next step")


def test_a_launch_that_fails_when_masters_have_been_written_counts(found):
    """Of the optimizer whose masters they are, and not of those that it did not come to."""
    counts, _, _ = found["_fail_everywhere"]["behind the masters"]
    assert counts == [3, 2]


ACTS = (_step_refused_twice, _rebuild_and_count, _exchange_unmanaged_masters, _fail_everywhere)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what became of all acts, one after another on one rank."""
    (of_rank,) = run_ranks(1, life_cycle.in_turn, ACTS)
    return of_rank
