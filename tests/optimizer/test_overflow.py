"""Finite gradients that are too large to be squared stop a step as NaN does, fused or not.

Megatron sums squares in fp32; where that sum is Inf, so would second moments be, for good.
"""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.errors import NonFiniteError
from moe_optim.formats.reference.adam import Hyper, step_into
from moe_optim.optimizer.adam import MOMENTS
from moe_optim.optimizer.chained import norms_of
from tests.optimizer.test_nonfinite import _snapshot
from tests.optimizer.test_read_anew import DENSE, LAST, _after_two_steps, _part_of
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states import life_cycle

FP32_MAX = torch.finfo(torch.float32).max
Trial = tuple[int, list[float]]
"""The layer, and what its first gradients are."""
STEPPED: dict[str, Trial] = {
    "the largest": (DENSE, [1.8446742e19]),
    "together just below": (0, [1.3e19, -1.3e19]),
    "in a norm of its own": (LAST, [1.8e19]),
}
STOPPED: dict[str, Trial] = {
    "just above": (DENSE, [1.8446746e19]),
    "above": (0, [1e20]),
    "negative": (DENSE, [-1e21]),
    "in a norm of its own": (LAST, [1e20]),
}
TOGETHER: Trial = (DENSE, [1.31e19, 1.31e19])


def _counts(optimizer: Any) -> list[int]:
    return [group["step"] for group in optimizer.param_groups]


def _try(step: str, trial: Trial, policy: str = "raise") -> str:
    """Take a third step on large gradients, and return what was said; nothing where it moved."""
    cycle = _after_two_steps(step)
    number, values = trial
    cycle.params[number].main_grad.view(-1)[5 : 5 + len(values)] = torch.tensor(values)
    cycle.optimizer.policy = policy
    before, counts = _snapshot([cycle.ddp], cycle.optimizer), _counts(cycle.optimizer)
    try:
        moved = cycle.optimizer.step()[0]
    except NonFiniteError as error:
        moved, said = False, str(error)
    else:
        said = "" if moved else "skipped"
    after = _snapshot([cycle.ddp], cycle.optimizer)
    assert all(tensor.float().isfinite().all() for tensor in after.values())
    if not moved:
        assert_same_tensors(after, before, what="states")
        assert _counts(cycle.optimizer) == counts
    return said


@life_cycle.on_a_rank
def test_a_step_is_taken_exactly_where_fp32_holds_the_sum_of_squares():
    """Otherwise no byte changes, the step does not count, and the parameter is named."""
    for step in ("stock", "fused"):
        _try_all(step)


def _try_all(step: str) -> None:
    said = {
        "stepped": {name: _try(step, trial) for name, trial in STEPPED.items()},
        "stopped": {name: _try(step, trial) for name, trial in STOPPED.items()},
        "skipped": {"above": _try(step, STOPPED["above"], "skip")},
        "together": {"together": _try(step, TOGETHER)},
    }
    assert said["stepped"] == dict.fromkeys(STEPPED, "")
    for name, (number, _) in STOPPED.items():
        layer = ("first", "dense", "last")[number]
        large = "1 finite gradient whose square is Inf in fp32"
        line = rf"norm( of mtp)? is inf\. rank 0: {layer}\S*weight.*: {large}"
        assert re.search(line, said["stopped"][name]), said["stopped"][name]
    assert said["skipped"] == {"above": "skipped"}
    assert "No square of a gradient is Inf in fp32, but the sum" in said["together"]["together"]


def _overflow_over_ranks() -> str:
    life_cycle.initialize()
    cycle = life_cycle.LifeCycle(step="fused")
    cycle.zero()
    cycle.micro(1, last=True)
    gradient = cycle.params[DENSE].main_grad.view(-1)
    gradient[0] = gradient[-1] = 1.31e19  # each rank owns one of them
    owned = [len(part.get_parameters()) for part in cycle.optimizer.chained_optimizers]
    assert owned == [2, 1]
    with pytest.raises(NonFiniteError) as error:
        cycle.optimizer.step()
    return str(error.value)


def test_squares_of_all_ranks_are_added_up_before_they_overflow():
    """Each rank's own sum is one that fp32 holds."""
    for said in run_ranks(2, _overflow_over_ranks):
        assert said.startswith("optimizer step: gradient norm is inf. No square")


def _largest(dtype: torch.dtype) -> torch.Tensor:
    """Return the largest fp32 number whose square a dtype holds."""
    root = torch.tensor(math.sqrt(torch.finfo(dtype).max), dtype=torch.float32)
    while float(root.double() ** 2) > torch.finfo(dtype).max:
        root = torch.nextafter(root, torch.zeros_like(root))
    return root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(deadline=None)
@given(beta1=st.floats(0, 0.9999), beta2=st.floats(0, 0.999999), step=st.integers(1, 9))
def test_no_gradient_that_is_stepped_makes_a_moment_infinite(dtype, beta1, beta2, step):
    """Whatever finite moments there were, the largest included: the next ones are finite, and so
    on for good. That the norm lets no larger gradient through is tested above."""
    largest = torch.finfo(dtype).max
    master, gradient = torch.ones(6), _largest(dtype) * torch.tensor([1, 1, 1, -1, -1, -1])
    exp_avg = torch.tensor([0, largest, -largest] * 2, dtype=dtype)
    exp_avg_sq = torch.tensor([0, largest, 1.0] * 2, dtype=dtype)
    for count in range(step, step + 4):
        hyper = Hyper(lr=0.1, betas=(beta1, beta2), eps=1e-8, weight_decay=0.1, step=count)
        step_into(
            *(master, gradient, exp_avg, exp_avg_sq),
            hyper=torch.tensor(hyper.row()),
            clip=torch.ones(()),
            decoupled=True,
        )
        for tensor in (exp_avg, exp_avg_sq):
            assert tensor.float().isfinite().all()


def test_the_bound_is_that_of_the_dtype_of_second_moments():
    """And roots are those of the sum, rounded once."""
    values = [0, 1e-300, 2, 3.38e38, 3.4e38, FP32_MAX, 3.41e38, torch.inf, torch.nan]
    squares = torch.tensor(values, dtype=torch.float64)
    wide = SimpleNamespace(use_precision_aware_optimizer=False, exp_avg_sq_dtype=torch.bfloat16)
    narrow = SimpleNamespace(use_precision_aware_optimizer=True, exp_avg_sq_dtype=torch.bfloat16)
    found = [norms_of(squares, config) for config in (wide, narrow)]
    for norms, finite in zip(found, (6, 4), strict=True):
        assert norms.dtype == torch.float32
        assert torch.equal(norms[:finite], squares[:finite].sqrt().float())
        assert norms[finite:-1].isinf().all() and norms[-1].isnan()


@life_cycle.on_a_rank
def test_no_checkpoint_is_saved_of_moments_that_are_not_finite():
    """They would never heal, and are named as masters are."""
    cycle = _after_two_steps()
    cycle.optimizer.step()
    part, said = _part_of(cycle, DENSE), list[str]()
    savers = (part, cycle.optimizer)  # a chain of two, as of experts and all else
    for name in MOMENTS:
        state = part.optimizer.state[part.get_parameters()[0]]
        kept = state[name].clone()
        state[name][3] = torch.inf
        for saver in savers:
            with pytest.raises(NonFiniteError) as error:
                saver.save_parameter_state("/nowhere")
            said.append(str(error.value))
        state[name].copy_(kept)
    for name, line in zip([name for name in MOMENTS for _ in savers], said, strict=True):
        assert re.search(
            rf"masters and moments: expected finite values, got data-parallel rank 0: \S*weight.*: "
            rf"1 non-finite {name}\. Nothing has been saved",
            line,
        ), line
