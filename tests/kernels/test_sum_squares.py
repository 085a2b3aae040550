"""The squared norm of gradients, one number for all cuts of them, and how many are zero."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim import ops
from moe_optim.errors import LayoutError
from moe_optim.kernels.norm import Gradients, NormTable
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights

NUMEL = 1000
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

pieces = st.lists(
    st.tuples(st.integers(0, NUMEL), st.integers(0, 2), st.sampled_from(list(DTYPES))),
    min_size=1,
    max_size=8,
)


def summed(*gradients, **options):
    table = NormTable.build(gradients, **options)
    ops.sum_squares(table)
    return table


def squares_of(values):
    return values.double().square().sum()


@given(pieces, st.integers(0, 3))
def test_every_cut_gives_each_group_the_sum_of_its_elements(pieces, seed):
    """As fp32: empty tensors, views that begin anywhere, and both dtypes in one table included."""
    values = wide_range_weights(NUMEL, seed=seed).bfloat16().float()  # the same in both dtypes
    cuts = sorted(place for place, _, _ in pieces[1:])
    parts = values.tensor_split(cuts)
    kinds = [(group, dtype) for _, group, dtype in pieces]
    table = summed(
        *(Gradients(part.to(d), g) for part, (g, d) in zip(parts, kinds, strict=True)),
        num_groups=3,
        count_zeros=True,
    )
    for group, got in enumerate(table.squares):
        owned = [part for part, (g, _) in zip(parts, kinds, strict=True) if g == group]
        want = squares_of(torch.cat([values[:0], *owned]))
        assert_bytes_equal(got.float(), want.float(), what=f"group {group}")
    assert table.zeros.item() == (values == 0).sum()


def test_neither_the_largest_nor_the_smallest_values_leave_the_range():
    for value in (torch.finfo(torch.float32).max, 2.0**-149):
        assert summed(Gradients(torch.full((3,), value))).squares.item() == 3 * value**2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_shows_in_its_group_only(value):
    bad = torch.tensor([1.0, value, 2.0])
    table = summed(Gradients(torch.ones(4)), Gradients(bad, 1), Gradients(torch.ones(5), 2))
    assert table.squares[0] == 4 and table.squares[2] == 5
    assert math.isnan(table.squares[1]) if math.isnan(value) else table.squares[1] == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_zeros_of_both_signs_are_counted_over_all_groups(dtype):
    values = torch.tensor([0.0, -0.0, 2.0**-133, math.nan, math.inf, 1.0, -0.0], dtype=dtype)
    gradients = Gradients(values), Gradients(values[:2], 1)
    assert summed(*gradients, count_zeros=True).zeros.tolist() == [5]
    assert summed(*gradients).zeros.tolist() == [0]


def test_another_step_starts_from_zero():
    """Whatever became of the results of the last one, which ranks add up in place."""
    values = torch.zeros(6)
    table = summed(Gradients(values[:3]), Gradients(values[3:], 1), count_zeros=True)
    table.squares.fill_(7)
    values[:4] = 2.0
    ops.sum_squares(table)
    assert table.squares.tolist() == [12, 4]
    assert table.zeros.tolist() == [2]


def test_without_gradients_there_are_zeros_for_every_group():
    """So that a rank that owns nothing adds up its squares with the others."""
    table = summed(num_groups=2, device="cpu", count_zeros=True)
    assert_bytes_equal(table.squares, torch.zeros(2, dtype=torch.float64))
    assert_bytes_equal(table.zeros, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("moved", range(3))
def test_a_table_watches_gradients_of_every_piece_of_memory(moved):
    values = [torch.ones(8) for _ in range(3)]
    table = NormTable.build([Gradients(one) for one in values])
    assert not table.has_moved
    values[moved].data = torch.ones(8)
    assert table.has_moved


def test_a_table_notices_that_gradients_have_moved_and_sums_those_of_now():
    memory, other = torch.ones(10), torch.full((4,), 3.0)
    table = NormTable.build([Gradients(memory[2:6]), Gradients(memory[:0])])
    assert not table.has_moved
    table.gradients[0].values.data = other
    assert table.has_moved
    ops.sum_squares(table)
    assert table.squares.tolist() == [36]


def test_gradients_are_not_copied():
    values = torch.ones(4)
    assert NormTable.build([Gradients(values)]).gradients[0].values is values


@pytest.mark.parametrize(
    ("gradients", "says"),
    [
        (Gradients(torch.zeros(2, 3)), r"flat contiguous tensor, got shape \[2, 3\]"),
        (Gradients(torch.zeros(6)[::2]), r"got shape \[3\] with strides \[2\]"),
        (Gradients(torch.zeros(3, dtype=torch.float16)), "fp32 or bf16, got torch.float16"),
        (Gradients(torch.zeros(3, device="meta")), "gradients on cpu, got meta"),
        (Gradients(torch.zeros(3), 2), "a group from 0 to 1, got 2"),
        (Gradients(torch.zeros(3), -1), "a group from 0 to 1, got -1"),
    ],
)
def test_other_gradients_are_refused_by_their_place(gradients, says):
    with pytest.raises(LayoutError, match=rf"^norm table: gradients\[1\]: expected .*{says}"):
        NormTable.build([Gradients(torch.zeros(3)), gradients], num_groups=2)
