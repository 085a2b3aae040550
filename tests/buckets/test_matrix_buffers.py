"""Buffers of Muon's matrices: who steps which parameter, and layouts that Megatron takes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers

from moe_optim.buckets import matrix_buffers
from moe_optim.buckets.layout import Slot, plan_buffers, side_by_side
from moe_optim.buckets.matrix_buffers import is_muon_matrix, matrix_param_layout, tag_matrices
from moe_optim.formats import FORMATS
from tests.support.states.buckets import make_params

BUSBW = 1 << 16


def parameter(*shape, **attributes):
    param = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


def expert(*shape, **attributes):
    """Return a weight of experts, to which its linear has given ``allreduce``."""
    return parameter(*shape, allreduce=False, **attributes)


# Which parameters


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        (parameter(8, 4), True),
        (parameter(8, 4, is_embedding_or_output_parameter=False), True),
        (parameter(8, 4, is_embedding_or_output_parameter=True), False),
        (parameter(8), False),
        (expert(4), False),
        (expert(8, 4), True),
        (expert(2, 8, 4), True),
        (parameter(2, 8, 4, allreduce=True), True),
        (parameter(8, 1, 4), False),
        (parameter(), False),
        (expert(2, 2, 8, 4), False),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else str(value),
)
def test_muon_steps_matrices_that_are_neither_embeddings_nor_filters(param, expected):
    assert is_muon_matrix(param) is expected


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_muon_steps_quantized_weights_of_experts(format):
    (param,) = make_params(format, side_by_side([(2, 128, 256)]))
    assert is_muon_matrix(param)


def test_megatron_separates_matrices_of_experts_by_shape():
    norm, embedding = parameter(64), parameter(100, 64, is_embedding_or_output_parameter=True)
    dense = [parameter(64, 32), parameter(32, 64)]
    wide = [expert(4, 64, 32), expert(2, 64, 32)]
    tall = [expert(4, 32, 64)]
    params = [embedding, norm, *dense, *wide, *tall]
    tag_matrices(params)
    assert [param.is_managed_by_layer_wise_optimizer for param in params] == [
        *(False, False, True, True),
        *("64x32", "64x32", "32x64"),
    ]
    groups = group_params_for_buffers(params, grad_reduce_in_fp32=True)
    buffers = [members for members, _ in groups.values()]
    assert [[id(one) for one in members] for members in buffers] == [
        [id(one) for one in members] for members in ([embedding, norm], dense, wide, tall)
    ]
    assert [bool(key.is_managed_by_layer_wise_optimizer) for key in groups] == [False] + 3 * [True]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_buffers_are_apart_where_muon_is_installed(optimizer, monkeypatch):
    """Where Adam steps everything, embeddings, norms and matrices share one, as in Megatron."""
    monkeypatch.setattr(matrix_buffers, "installed_optimizer", lambda: optimizer)
    adams = [parameter(100, 64, is_embedding_or_output_parameter=True), parameter(64)]
    matrices = [parameter(64, 32), parameter(32, 64)]
    groups = matrix_buffers.group_params_for_buffers([*adams, *matrices], True)
    buffers = [[id(one) for one in members] for members, _ in groups.values()]
    apart = [[id(one) for one in adams], [id(one) for one in matrices]]
    assert buffers == (apart if optimizer == "muon" else [[*apart[0], *apart[1]]])


# Layouts


shapes = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 9), st.just(16), st.just(64)),
)


@given(
    shapes=st.lists(shapes, min_size=1, max_size=12),
    dp_size=st.integers(1, 8),
    bucket_size=st.none() | st.integers(1, 10_000),
)
def test_megatrons_constructor_finds_every_parameter_in_the_bucket_that_comes_next(
    shapes, dp_size, bucket_size
):
    """Buckets are numbered in the order of the backward pass, without gaps, and divide."""
    params = [parameter(*shape) for shape in shapes]
    divisor = 128 * dp_size
    layout = matrix_param_layout(params, bucket_size, dp_size, divisor, list(range(len(params))))
    numbers = [layout.param_index_map[param][2] for param in params[::-1]]
    assert numbers[0] == 0
    assert all(after - before in (0, 1) for before, after in pairwise(numbers))
    assert len(layout.bucket_indices) == len(layout.per_bucket_numel_unpadded) == numbers[-1] + 1
    for start, end in layout.bucket_indices:
        assert start % divisor == end % divisor == 0
    for param in params:
        first, last, number = layout.param_index_map[param]
        start, end = layout.bucket_indices[number]
        shard_numel = (end - start) // dp_size
        count = param.shape[0] if param.dim() == 3 else 1
        assert last - first == param.numel()
        for matrix in range(count):
            head = first - start + matrix * (param.numel() // count)
            tail = head + param.numel() // count - 1
            assert head // shard_numel == tail // shard_numel < dp_size
    for number, (start, _) in enumerate(layout.bucket_indices):
        ends = [last for _, last, bucket in layout.param_index_map.values() if bucket == number]
        assert layout.per_bucket_numel_unpadded[number] == max(ends) - start
    assert layout.param_indices == list(range(len(params)))
    assert getattr(layout, "num_optimizer_shards", dp_size) == dp_size  # dev does not record it


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("divisor", [3 * 128, 3 * BUSBW], ids=["", "busbw"])
def test_every_shard_of_quantized_matrices_has_whole_bytes_and_scales(format, divisor):
    """So scales are gathered with the data, none is reduced over all ranks."""
    shapes = [(1, 128, 256), (1, 384, 128), (1, 128, 128), (5, 256, 256), (4, 256, 256)]
    params = make_params(format, side_by_side(shapes))
    layout = matrix_param_layout(params, None, 3, divisor)
    ((_, numel),) = layout.bucket_indices
    slots = [
        Slot(name="", start=layout.param_index_map[param][0], shape=shape)
        for param, shape in zip(params, shapes, strict=True)
    ]
    buffers = plan_buffers(format, slots, numel, 3)
    assert all(buffer.is_sliced or buffer.name == "global_amax" for buffer in buffers)
