"""``python -m benchmarks muon``: its rows, and the sums that they are compared with."""

import pytest
import torch

from benchmarks.muon import step
from benchmarks.muon.cases import (
    Experts,
    fewest_operations,
    plain_operations,
    settings_of,
)
from moe_optim.formats import FP8_BLOCK

pytest.importorskip("emerging_optimizers")
FEW = Experts(count=2, hidden=128, ffn=128)


# Steps


@pytest.mark.parametrize("format", [None, FP8_BLOCK])
def test_parts_run_one_after_another_are_a_launch(format):
    """Recording takes part in nothing: both give the same bytes, and every call is in one part."""
    settings = settings_of("auto", apart=True)
    states = [step.States.draw(FEW, "cpu") for _ in range(2)]
    launched, in_parts = (
        step.FusedStep.build(FEW.weights(apart=True), one, settings, format) for one in states
    )
    launched.table.launch()
    for _, plan in in_parts.parts:
        plan.launch()
    for one, other in zip(states[0].masters, states[1].masters, strict=True):
        assert torch.equal(one, other)
    calls = [call for _, plan in in_parts.parts for call in plan.calls]
    table = in_parts.table
    own = [call for chunk in table.chunks for call in chunk.calls]
    assert len(calls) == len(table.momentum.calls) + len(own) + len(table.updates.finish.calls)


def test_the_fused_step_is_stocks_within_rounding_of_the_iteration():
    """The compared steps do the same work: updates differ by what bf16 rounds."""
    first = step.States.draw(FEW, "cpu")
    second, before = first.copy(), first.copy()
    step.stock_step(FEW, first)()
    settings = settings_of("auto", apart=True)
    fused = step.FusedStep.build(FEW.weights(apart=True), second, settings, None)
    fused.table.launch()
    for ours, stock, old in zip(second.masters, first.masters, before.masters, strict=True):
        change = (stock - old).norm()
        assert change > 0
        assert (ours - stock).norm() < 0.02 * change


# Sums


def test_operations_are_counted_product_by_product():
    """Of 3 matrices [4, 6] over 5 steps: X X^T, A A and B X, without and with symmetry."""
    batches = [(3, 4, 6), (3, 6, 4)]
    gram, square, apply = 2 * 4 * 4 * 6, 2 * 4**3, 2 * 4 * 4 * 6
    assert plain_operations(batches, 5) == 6 * 5 * (gram + square + apply)
    assert fewest_operations(batches, 5, "auto") == 6 * 5 * (gram // 2 + square // 2 + apply)
    # Q begins twice; 5 polynomials, 3 times two products for the Gram matrix, 3 for Q
    with_gram = 2 * (gram // 2 + apply) + (5 + 6 + 3) * square // 2
    assert fewest_operations(batches, 5, "gram") == 6 * with_gram
    # it begins a third time at the sixth step
    of_six = 3 * (gram // 2 + apply) + (6 + 6 + 3) * square // 2
    assert fewest_operations(batches, 6, "gram") == 6 * of_six
    assert fewest_operations(batches, 1, "gram") == 6 * (gram // 2 + square // 2 + apply)
