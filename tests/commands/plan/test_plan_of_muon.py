"""A plan of Muon counts the layouts that a run uses, ours and stock's."""

from itertools import pairwise
from math import prod
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.param_layout import bucket_end_divisor

from moe_optim.buckets.matrix_buffers import matrix_param_layout, tag_matrices
from moe_optim.commands.plan.costs import STOCK_BF16
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import FORMATS
from tests.commands.plan.test_plan import (
    BUCKET_SIZE,
    EXPERTS,
    FFN,
    HIDDEN,
    LAYERS,
    experts_of,
    row_of,
)

SHAPES = ((2 * FFN, HIDDEN), (HIDDEN, FFN))
USED = LAYERS * EXPERTS * sum(map(prod, SHAPES))


def owned_by_rank(layout, dp_size):
    """Return the elements of parameters in the shard of each rank."""
    owned = [0] * dp_size
    for start, end, bucket in layout.param_index_map.values():
        first, last = layout.bucket_indices[bucket]
        edges = [first + rank * (last - first) // dp_size for rank in range(dp_size + 1)]
        for rank, (low, high) in enumerate(pairwise(edges)):
            owned[rank] += max(0, min(end, high) - max(start, low))
    return owned


def assert_counts(row, layouts, dp_size):
    """Hold a row to the layouts of all buffers of a rank."""
    numel = sum(layout.bucket_indices[-1][1] for layout in layouts)
    owned = [
        sum(ranks) for ranks in zip(*(owned_by_rank(x, dp_size) for x in layouts), strict=True)
    ]
    assert sum(owned) == USED
    assert row["buckets"] == sum(len(layout.bucket_indices) for layout in layouts)
    assert row["padding_fraction"] == (numel - USED) / numel
    assert row["parts"]["gradients"] == 4 * numel
    assert row["parts"]["masters"] == row["parts"]["moments"] == 4 * max(owned)


@pytest.mark.parametrize("layout", ["grouped", "indexed"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "int4"])
def test_our_rows_are_the_layouts_of_matrices(name, layout):
    """Grouped weights have a buffer for each shape. Masters and momentum take 4 bytes each."""
    linears = [
        GroupedLinear(EXPERTS, *shape, format=FORMATS[name], expert_layout=layout)
        for _ in range(LAYERS)
        for shape in SHAPES
    ]
    params = [param for linear in linears for param in linear.parameters()]
    for param in params:
        param.allreduce = False
    tag_matrices(params)
    buffers = {}
    for param in params:
        buffers.setdefault(param.is_managed_by_layer_wise_optimizer, []).append(param)
    assert len(buffers) == (2 if layout == "grouped" else 1)
    for dp_size in (1, 3, 8):
        divisor = bucket_end_divisor(dp_size, False)
        layouts = [
            matrix_param_layout(buffer, BUCKET_SIZE, dp_size, divisor)
            for buffer in buffers.values()
        ]
        row = row_of(experts_of(grouped=layout == "grouped", optimizer="muon"), dp_size, name)
        assert_counts(row, layouts, dp_size)


@pytest.mark.parametrize(("busbw", "dp_size"), [(None, 1), (None, 24), (True, 7)])
def test_the_stock_row_is_megatrons_layer_wise_layout(busbw, dp_size):
    """Each expert is a parameter, which is what Megatron's Muon orthogonalizes."""
    shapes = [shape for _ in range(LAYERS) for shape in SHAPES for _ in range(EXPERTS)]
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=bool(busbw))
    layout = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
        params, BUCKET_SIZE, dp_size, config
    )
    for grouped in (True, False):
        experts = experts_of(
            grouped=grouped, optimizer="muon", ddp_pad_buckets_for_high_nccl_busbw=busbw
        )
        row = row_of(experts, dp_size, STOCK_BF16)
        assert_counts(row, [layout], dp_size)
        assert row["gathered_bytes_per_step"] == 2 * layout.bucket_indices[-1][1]
