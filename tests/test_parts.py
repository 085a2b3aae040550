"""Parts of a weight, quantized on their own ranks, are slices of the weight quantized whole."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_optim
from moe_optim.errors import LayoutError
from moe_optim.formats import (
    FORMATS,
    MXFP8,
    NVFP4,
    QuantizedWeight,
    reference,
)
from moe_optim.formats.partition import infer_partition
from moe_optim.formats.reference.blocks import expert_amax_into
from moe_optim.kernels.plan import Plan
from moe_optim.parts import quantize_part
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.number_formats.meshes import coordinates, on_each_rank, part_of
from tests.support.ptx.launches import plan_kernels
from tests.support.ranks import run_ranks

NAMES = [*FORMATS, "bf16"]


def quantized_whole(weight, format):
    """Return the buffers that parts are slices of."""
    if format == "bf16":
        return {"data": weight.bfloat16()}
    quantized = reference.quantize(weight, FORMATS[format])
    if quantized.format.is_row_only:
        return quantized.buffers()
    return quantized.buffers() | {"columnwise_data": quantized.columnwise_data}


def assert_parts_are_slices(weight, partition, results, what=""):
    """Compare what every rank has with its slice of every buffer."""
    format = "bf16" if partition.format is None else partition.format.name
    whole = quantized_whole(weight, format)
    for coordinate, buffers in zip(coordinates(partition), results, strict=True):
        assert buffers.keys() == whole.keys()
        bounds = partition.bounds(coordinate)
        for buffer in partition.buffers:
            expected = whole[buffer.name][buffer.slices(bounds)]
            name = f"{what} {format} {buffer.name} at {coordinate}"
            assert_bytes_equal(buffers[buffer.name], expected, what=name)
            assert buffers[buffer.name].is_contiguous()


def quantize_on_ranks(weight, partition, **options):
    return on_each_rank(
        partition,
        lambda coordinate, reduce_max: quantize_part(
            part_of(weight, partition, coordinate), partition, coordinate, reduce_max, **options
        ),
    )


@st.composite
def cut_weights(draw):
    """Return a partition of at most 24 ranks, which cuts blocks, or goes between them."""
    format = draw(st.sampled_from(NAMES))
    multiple, packed, row_only = 12, 1, False
    if format != "bf16":
        multiple, packed = FORMATS[format].dimension_multiple, FORMATS[format].elements_per_byte
        row_only = FORMATS[format].is_row_only
    step = multiple if multiple > 12 else 12
    rows = (12 if row_only else step) * draw(st.integers(1, 12))
    columns = step * draw(st.integers(1, 12 if step < 128 else 3))
    shape = (draw(st.integers(1, 2)), rows, columns)
    axes, ranks = {}, 1
    for dimension, size in zip(("experts", "rows", "columns"), shape, strict=True):
        for name in ("outer", "inner"):
            keeps = 1 if dimension == "experts" else packed
            parts = [n for n in (1, 2, 3, 4) if size % (n * keeps) == 0 and ranks * n <= 24]
            count = draw(st.sampled_from(parts))
            axes.setdefault(dimension, {})[f"{name} {dimension}"] = count
            size, ranks = size // count, ranks * count
    return infer_partition(format, axes, shape=shape)


@settings(max_examples=40)
@given(
    partition=cut_weights(),
    seed=st.integers(0, 2**31),
    wide=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_cut_of_experts_rows_and_columns_equals_the_whole_weight(partition, seed, wide, dtype):
    """Data, scales of both directions and amaxes, in every format, to the byte."""
    exponents = (-40, 40) if wide else (-2, 2)
    weight = wide_range_weights(*partition.shape, seed=seed, exponents=exponents).to(dtype)
    results = quantize_on_ranks(weight, partition)
    assert_parts_are_slices(weight, partition, results)


@settings(max_examples=15)
@given(partition=cut_weights(), seed=st.integers(0, 2**31))
def test_the_amax_of_every_expert_is_a_maximum_over_the_axes_it_names(partition, seed):
    """As a calibration finds it, whatever the format."""
    weight = wide_range_weights(*partition.shape, seed=seed)
    expected = torch.zeros(partition.shape[0])
    expert_amax_into(expected, weight, 0, prod(partition.shape[1:]))

    def find(coordinate, reduce_max):
        part = part_of(weight, partition, coordinate).contiguous()
        amax = torch.zeros(len(part))
        expert_amax_into(amax, part, 0, prod(part.shape[1:]))
        for axis in partition.expert_amax.axes:
            reduce_max(amax, axis)
        return amax

    for coordinate, amax in zip(coordinates(partition), on_each_rank(partition, find), strict=True):
        experts = partition.bounds(coordinate)["experts"]
        assert_bytes_equal(amax, expected[experts.start : experts.stop])


CUTS = {  # shape, axes; of the last the blocks of no format are whole
    "experts": ((4, 128, 128), {"experts": {"ep": 2}}),
    "rows twice, inside of blocks": ((2, 192, 128), {"rows": {"tp": 2, "fsdp": 12}}),
    "both, inside of blocks": ((2, 64, 128), {"rows": {"tp": 8}, "columns": {"fsdp": 16}}),
}


@pytest.mark.parametrize(("shape", "axes"), CUTS.values(), ids=CUTS)
def test_special_values_on_all_sides_of_cuts(shape, axes):
    weight = with_specials(wide_range_weights(*shape), every=7)
    weight[0, :, ::3] = 0.0
    for format in NAMES:
        partition = infer_partition(format, axes, shape=shape)
        assert_parts_are_slices(weight, partition, quantize_on_ranks(weight, partition))


def _whole_blocks(format):
    shape = (2, 2 * format.block_row_height, 4 * format.block_length)
    axes = {"experts": {"ep": 2}, "rows": {"tp": 2}, "columns": {"fsdp": 2}}
    return infer_partition(format, axes, shape=shape)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_parts_of_whole_blocks_are_weights(format):
    """Their buffers are those of a ``QuantizedWeight``, and dequantize to their values."""
    partition = _whole_blocks(format)
    assert partition.has_whole_blocks
    weight = wide_range_weights(*partition.shape)
    values = moe_optim.dequantize(reference.quantize(weight, format))
    results = quantize_on_ranks(weight, partition)
    for coordinate, buffers in zip(coordinates(partition), results, strict=True):
        own = (buffers[name] for name in format.buffer_names)
        part = QuantizedWeight.of_buffers(format, partition.part_shape, own)
        assert_bytes_equal(moe_optim.dequantize(part), part_of(values, partition, coordinate))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_whole_blocks_are_left_to_kernels_where_these_run(format, monkeypatch):
    """Also those whose experts go on elsewhere: a launch finds their amaxes."""
    launched = []
    plan_kernels(monkeypatch)
    monkeypatch.setattr(Plan, "launch", lambda plan: launched.append(plan))
    partition = _whole_blocks(format)
    coordinate = dict.fromkeys(("ep", "tp", "fsdp"), 0)
    quantize_part(torch.zeros(partition.part_shape), partition, coordinate, lambda *_: None)
    find_maxima, encode, finish = launched
    assert encode.kernels and encode.kernels == encode.calls and finish.kernels == finish.calls
    assert bool(find_maxima.kernels) is format.has_global_amax


def test_the_part_is_left_alone_and_nothing_is_a_view_of_it():
    weight = wide_range_weights(1, 64, 128).bfloat16()
    before = weight.clone()
    for format in NAMES:
        partition = infer_partition(format, {}, shape=weight.shape)
        for buffer in quantize_part(weight, partition, {}).values():
            buffer.view(torch.uint8).fill_(1)
        assert_bytes_equal(weight, before)


PARTITION = infer_partition(MXFP8, {"rows": {"tp": 4}}, shape=(2, 64, 32))
REFUSED = {
    "shape": (torch.zeros(2, 64, 32), {"tp": 0}, r"^part: expected \[2, 16, 32\] of a weight"),
    "place": (torch.zeros(2, 16, 32), {"tp": 4}, "^coordinate: expected a place for each of tp: 4"),
    "no reduction": (
        torch.zeros(2, 16, 32),
        {"tp": 0},
        "^quantize_part: expected reduce_max, for maxima that the ranks of tp share",
    ),
}


@pytest.mark.parametrize(("part", "coordinate", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_exchanged(part, coordinate, message):
    calls = []
    reduce_max = None if "reduce_max" in message else lambda values, axis: calls.append(axis)
    with pytest.raises(LayoutError, match=message):
        quantize_part(part, PARTITION, coordinate, reduce_max)
    assert not calls


# Process groups

DOCUMENT = Path(__file__).parents[1] / "docs" / "formats.md"


ON_MESH = {"experts": {"ep": 1}, "rows": {"tp": 2}, "columns": {"fsdp": 2}}
IN_THE_DOCUMENT = {"experts": {"ep": 1}, "rows": {"tp": 2, "fsdp": 2}}


def test_a_device_mesh_gives_the_groups():
    """Real groups, one an axis; blocks are cut in rows and columns, but for NVFP4's. And the code
    of the document, as it stands there: experts on one rank, rows on two times two."""
    results = run_ranks(4, _quantize_on_mesh)
    for format in NAMES:
        weight = _mesh_weight(format)
        partition = infer_partition(format, ON_MESH, shape=weight.shape)
        buffers = [dict(result[format]) for result in results]
        assert_parts_are_slices(weight, partition, buffers)
    partition = infer_partition(NVFP4, IN_THE_DOCUMENT, shape=(2, 96, 96))
    of_document = [result["document"] for result in results]
    assert_parts_are_slices(_mesh_weight("nvfp4"), partition, of_document)


def _mesh_weight(format):
    return wide_range_weights(2, 96, 128 if format == "int4_g128" else 96)


def _quantize_on_mesh():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("ep", "tp", "fsdp"))
    coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))

    def reduce_max(values, axis):
        dist.all_reduce(values, dist.ReduceOp.MAX, group=mesh.get_group(axis))

    results = {}
    for format in NAMES:
        weight = _mesh_weight(format)
        partition = infer_partition(format, ON_MESH, shape=weight.shape)
        part = part_of(weight, partition, coordinate)
        results[format] = quantize_part(part, partition, coordinate, reduce_max)
    names: dict[str, Any] = {}
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    exec(code, names)
    weight = _mesh_weight("nvfp4")
    partition = infer_partition(NVFP4, IN_THE_DOCUMENT, shape=weight.shape)
    part = part_of(weight, partition, coordinate)
    return results | {"document": names["quantize_on_mesh"](part, weight.shape, mesh)}
