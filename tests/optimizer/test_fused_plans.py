"""What a fused step has planned is used while it is true, and not longer."""

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.kernels.step_table import StepTable
from moe_optim.optimizer.chained import GraphedStep
from moe_optim.weights.grouped_weight import GroupedWeight
from tests.optimizer.test_nonfinite import _snapshot
from tests.support.bytes import assert_same_tensors
from tests.support.states import life_cycle


def _train(cycle: life_cycle.LifeCycle, seed: int) -> None:
    cycle.zero()
    cycle.micro(seed, last=True)
    cycle.step()
    cycle.check()


@life_cycle.on_a_rank
def test_a_step_whose_plan_was_refused_has_not_been_taken():
    """However often it is tried; it does not count, and goes on where nothing is refused."""
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


@life_cycle.on_a_rank
def test_steps_in_which_nothing_moves_plan_nothing():
    cycle = life_cycle.LifeCycle(step="fused")
    _train(cycle, 0)
    parts = cycle.optimizer.chained_optimizers
    planned = [dict(part._tables) for part in parts]
    for seed in (1, 2):
        _train(cycle, seed)
        cycle.rollout(seed)
    assert [part._tables for part in parts] == planned
    assert sum(isinstance(param, GroupedWeight) for param in cycle.params) == 2


@life_cycle.on_a_rank
def test_unmanaged_masters_that_lie_elsewhere_are_planned_anew():
    """By the optimizer that has some, and by no other."""
    cycle = life_cycle.LifeCycle(step="fused")
    _train(cycle, 0)
    parts = cycle.optimizer.chained_optimizers
    before = [part._plans for part in parts]
    for _, master in (pair for part in parts for pair in part.book.unmanaged):
        master.data = master.data.clone()
    _train(cycle, 1)
    after = [part._plans for part in parts]
    counts = [len(part.book.unmanaged) for part in parts]
    assert [(count, new - old) for count, old, new in zip(counts, before, after, strict=True)] == [
        (1, 1),
        (0, 0),
    ]


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


@life_cycle.on_a_rank
def test_a_launch_that_fails_before_anything_is_written_does_not_count():
    """The steps after it have the bias corrections that they would have without it."""
    _, expected, expected_after = _fail("nowhere")
    for where in ("in a launch", "in a graph"):
        counts, states, after = _fail(where)
        assert counts == [2, 2]
        assert_same_tensors(states, expected, what=f"{where}: states")
        assert_same_tensors(after, expected_after, what=f"{where}: after the next step")


@life_cycle.on_a_rank
def test_a_launch_that_fails_when_masters_have_been_written_counts():
    """Of the optimizer whose masters they are, and not of those that it did not come to."""
    counts, _, _ = _fail("behind the masters")
    assert counts == [3, 2]
