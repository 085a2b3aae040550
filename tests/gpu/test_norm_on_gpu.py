"""One launch sums the squares of gradients on a GPU, and counts their zeros."""

import math

import pytest
import torch

from moe_optim.kernels.norm import NormInput, NormTable
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import e4m3_exact_integers, wide_range_weights
from tests.support.steps.launches import assert_neither_allocates_nor_waits

pytestmark = pytest.mark.gpu

NUMELS = (0, 1, 7, 4095, 4096, 65_537, 1_000_003, 3_000_000)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def lay_out(values, first=0):
    """Return views that lie in one memory one after the other, in three groups."""
    parts = values[first : first + sum(NUMELS)].split(NUMELS)
    return [NormInput(part, index % 3) for index, part in enumerate(parts)]


def wide(dtype, seed=0):
    return wide_range_weights(sum(NUMELS) + 10, seed=seed).to("cuda", dtype)


def assert_summed(table, what=""):
    """Squares are those of plain torch as fp32; so is the number of zeros."""
    squares = torch.zeros_like(table.squares)
    zeros = torch.zeros_like(table.zeros)
    for one in table.gradients:
        squares[one.group] += one.values.double().square().sum()
        zeros += (one.values == 0).sum()
    assert_bytes_equal(table.squares.float(), squares.float(), what=f"squares {what}")
    assert_bytes_equal(table.zeros, zeros * table.counts_zeros, what=f"zeros {what}")


@BOTH
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("count_zeros", [False, True], ids=["", "zeros"])
def test_squares_and_zeros_are_plain_torchs(dtype, first, count_zeros):
    """At any alignment; and of new values later."""
    memory = wide(dtype)
    table = NormTable.build(lay_out(memory, first), count_zeros=count_zeros)
    assert table.kernels
    for seed in (0, 1):
        memory.copy_(wide(dtype, seed))
        table.squares.fill_(math.nan)
        table.launch()
        assert_summed(table, f"from {first}, seed {seed}")


@BOTH
def test_sums_that_need_no_rounding_are_the_references_to_the_bit(dtype):
    values = e4m3_exact_integers(1, sum(NUMELS), 1).view(-1).to("cuda", dtype)
    launched = NormTable.build(lay_out(values), count_zeros=True)
    wanted = NormTable.build(lay_out(values), count_zeros=True, backend="reference")
    launched.launch()
    wanted.launch()
    assert_bytes_equal(launched.squares, wanted.squares)
    assert_bytes_equal(launched.zeros, wanted.zeros)


def test_a_captured_graph_sums_new_values():
    """And a launch allocates nothing, and does not wait."""
    memory = wide(torch.float32)
    gradients = [*lay_out(memory), *lay_out(wide(torch.bfloat16))]
    table = NormTable.build(gradients, count_zeros=True)
    assert_neither_allocates_nor_waits(table.launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.launch()
    for seed in (1, 2):
        memory.copy_(wide(torch.float32, seed))
        graph.replay()
        assert_summed(table, f"seed {seed}")


@pytest.mark.usefixtures("alone")
def test_gradients_of_more_than_two_to_the_31_elements():
    values = torch.ones((1 << 31) + 100, dtype=torch.bfloat16, device="cuda")
    values[-1] = 2.0
    table = NormTable.build([NormInput(values[1:])], count_zeros=True)
    table.launch()
    assert table.squares.item() == (1 << 31) + 98 + 4
    assert table.zeros.item() == 0
