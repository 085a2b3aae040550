"""No matrix crosses a shard, for any weights; padding and balance are within their bounds."""

from dataclasses import replace
from itertools import pairwise
from math import lcm

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from moe_optim.buckets.matrix_layout import (
    SINGLE_PADDING,
    MatrixLayout,
    MatrixStack,
    iteration_cost,
    lay_out_matrices,
)
from moe_optim.errors import LayoutError

MODELS = {  # matrices [R, C] of a layer that are not experts'
    "qwen3-30b-a3b": ((5120, 2048), (2048, 4096), (128, 2048)),
    "deepseek-v3": ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)),
}


def weight(count, rows, cols, cost=None, name="weight"):
    cost = iteration_cost(rows, cols) if cost is None else cost
    return MatrixStack(name=name, count=count, rows=rows, cols=cols, cost=cost)


def up(value, multiple):
    return -(-value // multiple) * multiple


sizes = st.integers(1, 40)
dp_sizes = st.integers(1, 9)
bucket_numels = st.none() | st.integers(1, 20_000)
units = st.sampled_from([64, 128, 192, 1024])
singles = st.builds(weight, st.just(1), sizes, sizes)
any_weights = st.lists(st.builds(weight, st.integers(1, 12), sizes, sizes), min_size=1, max_size=12)


@st.composite
def uniform_weights(draw, unit):
    """Weights of several matrices of one shape, of a multiple of the unit."""
    rows = draw(st.integers(1, 8))
    counts = draw(st.lists(st.integers(2, 20), min_size=1, max_size=12))
    return [weight(count, rows, unit) for count in counts]


def members(layout, bucket):
    """Return the indices of the weights of a bucket."""
    return [index for index, place in enumerate(layout.places) if place[2] == bucket]


def shard_numel(layout, bucket):
    start, end = layout.buckets[bucket]
    return (end - start) // layout.dp_size


def check_valid(layout: MatrixLayout, unit: int) -> None:
    """Check all of Megatron's invariants, and that every matrix lies inside one shard."""
    assert [start for start, _ in layout.buckets] == [0, *(end for _, end in layout.buckets[:-1])]
    assert all((end - start) % (layout.dp_size * unit) == 0 for start, end in layout.buckets)
    numbers = [number for _, _, number in layout.places]
    assert numbers[0] == 0
    assert numbers[-1] == len(layout.buckets) - 1
    assert all(after - before in (0, 1) for before, after in pairwise(numbers))
    for (_, end), (start, _) in pairwise(sorted(place[:2] for place in layout.places)):
        assert end <= start
    for index, (one, (start, end, number)) in enumerate(
        zip(layout.weights, layout.places, strict=True)
    ):
        bucket_start, bucket_end = layout.buckets[number]
        assert bucket_start <= start < end == start + one.numel <= bucket_end
        assert start % 64 == 0
        shard = shard_numel(layout, number)
        owners = []
        for matrix in range(one.count):
            first = start - bucket_start + matrix * one.matrix_numel
            owners.append(first // shard)
            assert (first + one.matrix_numel - 1) // shard == owners[-1]
        owned = layout.owners(index)
        assert [rank for rank, matrices in enumerate(owned) for _ in matrices] == owners
        assert [matrix for matrices in owned for matrix in matrices] == list(range(one.count))
    for number, unpadded in enumerate(layout.numel_unpadded):
        last = max(layout.places[index][1] for index in members(layout, number))
        assert unpadded == last - layout.buckets[number][0]


# Validity


@given(weights=any_weights, dp_size=dp_sizes, bucket_numel=bucket_numels, unit=units)
def test_no_matrix_crosses_a_shard_boundary(weights, dp_size, bucket_numel, unit):
    """Of any shapes and counts in one buffer, unless they are refused."""
    try:
        layout = lay_out_matrices(weights, dp_size=dp_size, bucket_numel=bucket_numel, unit=unit)
    except LayoutError:
        assert dp_size > 1
        assert any(one.count > 1 and one.matrix_numel % unit for one in weights) or (
            len({one.matrix_numel for one in weights if one.count > 1}) > 1
        )
        return
    check_valid(layout, unit)
    used = sum(one.numel for one in weights)
    assert layout.padding == (layout.buckets[-1][1] - used) / used


@given(data=st.data(), dp_size=dp_sizes, bucket_numel=bucket_numels, unit=units)
def test_experts_of_one_shape_among_single_matrices_always_have_a_layout(
    data, dp_size, bucket_numel, unit
):
    weights = data.draw(uniform_weights(unit)) + data.draw(st.lists(singles, max_size=12))
    weights = data.draw(st.permutations(weights))
    check_valid(
        lay_out_matrices(weights, dp_size=dp_size, bucket_numel=bucket_numel, unit=unit), unit
    )


# Padding


# Balance


@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dp_size", [2, 3, 8, 12, 32, 64, 128])
def test_no_rank_of_a_real_model_costs_more_than_in_megatrons_layout(shapes, dp_size):
    """Nor is there more padding, where it is above what every bucket may have."""
    weights = [weight(1, *shape) for _ in range(48) for shape in shapes]
    bucket_numel = max(40_000_000, 1_000_000 * dp_size)
    layout = lay_out_matrices(weights, dp_size=dp_size, bucket_numel=bucket_numel)
    check_valid(layout, 64)
    params = [torch.nn.Parameter(torch.empty(one.rows, one.cols, device="meta")) for one in weights]
    stock = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
        params[::-1], bucket_numel, dp_size, DistributedDataParallelConfig()
    )
    theirs = replace(
        layout,
        places=tuple(stock.param_index_map[param] for param in params),
        buckets=tuple(stock.bucket_indices),
        numel_unpadded=tuple(stock.per_bucket_numel_unpadded),
    )
    assert max(layout.costs_by_rank()) <= max(theirs.costs_by_rank())
    assert layout.padding <= max(theirs.padding, SINGLE_PADDING)


# Refusals


def test_experts_that_no_rank_can_own_whole_are_refused_with_what_to_set():
    """64 matrices of 960 elements: a shard of whole ones is a multiple of 122880."""
    experts = weight(64, 24, 40, name="layers.0.fc1")
    with pytest.raises(
        LayoutError,
        match=r"layers\.0\.fc1: .*8192 elements, got 64 of \[24, 40\].*no rank can own whole.*"
        "expert_layout: indexed",
    ):
        lay_out_matrices([experts], dp_size=8, bucket_numel=None, unit=8192)
    indexed = [weight(1, 24, 40)] * 64
    check_valid(lay_out_matrices(indexed, dp_size=8, bucket_numel=None, unit=8192), 8192)


def test_a_length_that_is_no_multiple_of_the_unit_still_holds_whole_matrices():
    """Matrices of 96 elements begin at multiples of 64 in pairs only."""
    layout = lay_out_matrices([weight(8, 8, 12)] * 3, dp_size=4, bucket_numel=None)
    check_valid(layout, 64)
    assert shard_numel(layout, 0) == lcm(64, 96) * 3
    assert layout.padding == 0
