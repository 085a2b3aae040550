"""Rows of a weight that form a matrix: gate and up, query, key and value, or all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.errors import LayoutError
from moe_optim.kernels.matrices import split_rows
from tests.support.bytes import assert_bytes_equal
from tests.support.matrix_rows import gate_and_up

COLS = 3
small = st.integers(1, 5)


def weights_of(rows, count=2):
    """Whole numbers, all different."""
    return torch.arange(count * rows * COLS, dtype=torch.float32).view(count, rows, COLS)


def matrix_of(rows, weights):
    view = rows.view(weights)
    assert view.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()
    return view.flatten(1, 2)


@given(small)
def test_gate_is_the_first_half_and_up_the_second(half):
    weights = weights_of(2 * half)
    gate, up = (matrix_of(one, weights) for one in gate_and_up(2 * half, None))
    assert_bytes_equal(torch.cat([gate, up], 1), weights)


@given(small, small)
def test_interleaved_gate_and_up_alternate_in_blocks(interleave, blocks):
    """Stacked block by block, they are the weight again."""
    weights = weights_of(2 * blocks * interleave)
    gate, up = (matrix_of(one, weights) for one in gate_and_up(weights.shape[1], interleave))
    pairs = zip(gate.split(interleave, 1), up.split(interleave, 1), strict=True)
    assert_bytes_equal(torch.cat([block for pair in pairs for block in pair], 1), weights)


@given(small, st.lists(small, min_size=1, max_size=4))
def test_query_key_and_value_are_megatrons_split(groups, split):
    """``view(groups, sum(split), -1).split(split, dim=1)``, of every weight."""
    weights = weights_of(groups * sum(split))
    for weight, index in zip(weights, range(2), strict=True):
        parts = weight.view(groups, sum(split), -1).split(split, dim=1)
        for part, rows in zip(parts, split_rows(len(weight), split), strict=True):
            assert_bytes_equal(matrix_of(rows, weights)[index], part.reshape(-1, COLS))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: split_rows(7, (3, 3)), "got 7 rows"),
        (lambda: split_rows(24, (8, 8)), "got 24 rows"),
        (lambda: split_rows(13, (4, 1, 1)), r"got 13 rows and the split \[4, 1, 1\]"),
        (lambda: split_rows(0, (4, 1, 1)), "got 0 rows"),
        (lambda: split_rows(12, (5, 0, 1)), r"a positive split, got 12 rows and the split \[5, 0"),
        (lambda: split_rows(12, ()), r"the split \[\]"),
    ],
)
def test_rows_that_cannot_be_cut_are_refused(make, says):
    with pytest.raises(LayoutError, match=f"expected .*{says}"):
        make()
