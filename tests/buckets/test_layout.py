"""Buckets that end later: what lies in them keeps its place, and each ends as it would alone."""

import torch
from megatron.core.optimizer.param_layout import PerBufferParamLayout

from moe_optim.buckets.buffer import align_buckets
from moe_optim.buckets.layout import side_by_side
from moe_optim.formats import MXFP8
from tests.support.states.buckets import make_params

DP_SIZE, DIVISOR = 9, 1
SHAPES = [(32, 32, 32), (1, 32, 32)]


def stock_layout(buckets: list[list[torch.nn.Parameter]]) -> PerBufferParamLayout:
    """Return parameters side by side, in buckets that end where the last of them does."""
    places, bounds, end = {}, [], 0
    for number, params in enumerate(buckets):
        start = end
        for param in params:
            places[param] = (end, end + param.numel(), number)
            end += param.numel()
        bounds.append((start, end))
    return PerBufferParamLayout(
        param_index_map=places,
        bucket_indices=bounds,
        per_bucket_numel_unpadded=[last - first for first, last in bounds],
    )


def test_each_of_several_buckets_ends_where_it_would_alone_and_begins_where_the_last_ends():
    buckets = [make_params(MXFP8, side_by_side(SHAPES, name=f"layers.{n}.fc")) for n in range(3)]
    together = align_buckets(stock_layout(buckets), DP_SIZE, DIVISOR)
    end = 0
    for number, params in enumerate(buckets):
        alone = align_buckets(stock_layout([params]), DP_SIZE, DIVISOR)
        ((_, numel),) = alone.bucket_indices
        assert numel > sum(param.numel() for param in params)  # of whole scales on each rank
        assert together.bucket_indices[number] == (end, end + numel)
        for param in params:
            first, last, _ = alone.param_index_map[param]
            assert together.param_index_map[param] == (end + first, end + last, number)
        end += numel
