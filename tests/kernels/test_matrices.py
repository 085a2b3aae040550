"""Rows of a weight that form a matrix: gate and up, query, key and value, or all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.errors import LayoutError
from moe_optim.kernels.matrices import MatrixShard, split_rows
from tests.support.bytes import assert_bytes_equal
from tests.support.matrix_rows import gate_and_up, indices_of, whole_rows

COLS = 3
small = st.integers(1, 5)


def weights_of(rows, count=2):
    """Whole numbers, all different."""
    return torch.arange(count * rows * COLS, dtype=torch.float32).view(count, rows, COLS)


def matrix_of(rows, weights):
    view = rows.view(weights)
    assert view.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()
    return view.flatten(1, 2)


def shard_of(shape=(2, 6, COLS), rows=None, *, numel=None, device="cpu", **tensors):
    count = shape[0] * shape[1] * shape[2] if numel is None else numel
    given = {"gradient": torch.zeros(count), "momentum": torch.zeros(count, device=device)}
    held = whole_rows(shape[1]) if rows is None else rows
    state = given | tensors
    return MatrixShard(parameter="fc1", shape=shape, rows=held, group=0, norm=0, **state)


@given(small)
def test_all_rows_are_the_weight(rows):
    weights = weights_of(rows)
    (whole,) = whole_rows(rows)
    assert_bytes_equal(matrix_of(whole, weights), weights)
    assert whole.rows == rows


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


@given(small, st.lists(small, min_size=1, max_size=4))
def test_indices_are_the_rows_that_a_view_shows(groups, split):
    weights = weights_of(groups * sum(split))
    for rows in split_rows(groups * sum(split), split):
        assert_bytes_equal(matrix_of(rows, weights), weights[:, indices_of(rows)])
        assert len(indices_of(rows)) == rows.rows


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


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (lambda: shard_of(numel=35), r"gradient: expected \[36\] .*, got \[35\]"),
        (lambda: shard_of(gradient=torch.zeros(36, dtype=torch.float16)), "gradient: .*float16"),
        (lambda: shard_of(momentum=torch.zeros(36, dtype=torch.bfloat16)), "momentum: .*bfloat16"),
        (lambda: shard_of(device="meta"), "gradient: expected .* on meta, .* on cpu"),
        (lambda: shard_of((0, 6, COLS)), "got 0 of 6 x 3"),
        (
            lambda: shard_of((1, 2**16, 2**15), numel=1),
            "2147483647 elements, got 1 of 65536 x 32768",
        ),
    ],
)
def test_a_shard_of_another_shape_is_refused_by_its_parameter(shard, says):
    with pytest.raises(LayoutError, match=rf"^Muon: fc1.*: .*{says}"):
        shard().check()
