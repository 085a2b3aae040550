"""What cuts of a weight do to its buffers and maxima, and that buffers cut by the same rules."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.buckets.layout import Slot, aligned_end, cuts_block_rows, plan_buffers
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import (
    FORMATS,
    FP8_BLOCK,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    QuantizedWeight,
)
from moe_optim.formats.partition import infer_partition
from moe_optim.kernels.exchange import plan_exchange
from tests.support.number_formats.meshes import coordinates

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
SHAPE = (4, 256, 512)

RULES = {  # format, axes -> maxima that need axes
    "nothing is cut": (NVFP4, {}, {}),
    "experts": (NVFP4, {"experts": {"ep": 4}}, {}),
    "whole blocks": (MXFP8, {"rows": {"tp": 8}, "columns": {"fsdp": 16}}, {}),
    "whole square blocks": (FP8_BLOCK, {"rows": {"tp": 2}, "columns": {"fsdp": 4}}, {}),
    "1x32 blocks do not mind rows": (
        MXFP8, {"rows": {"tp": 256}}, {"columnwise_scale": (("tp",), (256, 512))}),
    "32x1 blocks do not mind columns": (
        MXFP8, {"columns": {"tp": 512}}, {"rowwise_scale": (("tp",), (256, 512))}),
    "both of them": (
        MXFP8, {"rows": {"tp": 16}, "columns": {"fsdp": 32}},
        {"rowwise_scale": (("fsdp",), (16, 512)), "columnwise_scale": (("tp",), (256, 16))}),
    "square blocks in both": (
        MXFP8_2D, {"rows": {"tp": 16}, "columns": {"fsdp": 32}},
        {"rowwise_scale": (("tp", "fsdp"), (256, 512))}),
    "the outer axis leaves whole blocks": (
        MXFP8_2D, {"rows": {"tp": 4, "fsdp": 4}}, {"rowwise_scale": (("fsdp",), (64, 512))}),
    "the outer axis cuts blocks": (
        FP8_BLOCK, {"rows": {"tp": 4, "fsdp": 2}}, {"rowwise_scale": (("tp", "fsdp"), (256, 512))}),
    "an axis of one rank": (MXFP8, {"rows": {"tp": 1}}, {}),
    "the amax of an expert": (
        NVFP4, {"experts": {"ep": 2}, "rows": {"tp": 2}, "columns": {"fsdp": 2}},
        {"global_amax": (("tp", "fsdp"), (256, 512))}),
    "blocks of an expert, and its amax": (
        NVFP4, {"rows": {"tp": 2, "fsdp": 16}},
        {"rowwise_scale": (("fsdp",), (128, 512)), "global_amax": (("tp", "fsdp"), (256, 512))}),
    "bf16": ("bf16", {"rows": {"tp": 256}, "columns": {"fsdp": 512}}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("format", "axes", "maxima"), RULES.values(), ids=RULES)
def test_maxima_need_the_axes_that_cut_their_blocks(format, axes, maxima):
    partition = infer_partition(format, axes, shape=SHAPE)
    assert {one.name: (one.axes, one.extent) for one in partition.maxima} == maxima
    assert partition.has_whole_blocks is (maxima.keys() <= {"global_amax"})


@EVERY_FORMAT
def test_buffers_have_the_shapes_of_the_format(format):
    whole = QuantizedWeight.empty(format, SHAPE)
    partition = infer_partition(format, {}, shape=SHAPE)
    for buffer in partition.buffers:
        assert buffer.shape == getattr(whole, buffer.name).shape
        slices = buffer.slices(partition.bounds({}))
        assert [one.stop - one.start for one in slices] == list(buffer.shape)
    assert {buffer.name for buffer in partition.buffers} >= whole.buffers().keys()


# Held against every block and every rank


@st.composite
def cut_weights(draw):
    """Return a format, a shape and axes that cut it evenly, inside of blocks or not."""
    format = draw(st.sampled_from(list(FORMATS.values())))
    multiple = max(format.dimension_multiple, 12)
    shape = [draw(st.integers(1, 4)), *(multiple * draw(st.integers(1, 9)) for _ in range(2))]
    if format is FP8_BLOCK:
        shape[1:] = [12 * draw(st.integers(1, 24)) for _ in range(2)]
    axes: dict[str, dict[str, int]] = {}
    for dimension, size in zip(("experts", "rows", "columns"), shape, strict=True):
        for name in ("outer", "inner"):
            keeps_bytes = 1 if dimension == "experts" else format.elements_per_byte
            parts = [n for n in (1, 2, 3, 4) if size % (n * keeps_bytes) == 0]
            count = draw(st.sampled_from(parts))
            axes.setdefault(dimension, {})[f"{name} {dimension}"] = count
            size //= count
    return format, tuple(shape), axes


@settings(max_examples=25)
@given(weight=cut_weights())
def test_an_axis_is_needed_where_the_owners_of_some_block_differ_along_it(weight):
    """Neither more axes nor fewer, and what is reduced has every block of every owner in it."""
    format, shape, axes = weight
    partition = infer_partition(format, axes, shape=shape)
    by_name = {maxima.name: maxima for maxima in partition.maxima}
    owners = [(one, partition.bounds(one)) for one in coordinates(partition)]
    kinds = {f"{way}_scale": format.block(way) for way in format.gathered_directions}
    if format.has_global_amax:
        kinds["global_amax"] = shape[1:]
    for name, (height, width) in kinds.items():
        needed = set()
        for row, col in product(range(0, shape[1], height), range(0, shape[2], width)):
            touching = [
                (coordinate, bounds)
                for coordinate, bounds in owners
                if 0 in bounds["experts"]
                and bounds["rows"].start < row + height
                and row < bounds["rows"].stop
                and bounds["columns"].start < col + width
                and col < bounds["columns"].stop
            ]
            for axis in touching[0][0]:
                if len({coordinate[axis] for coordinate, _ in touching}) > 1:
                    needed.add(axis)
        assert needed == set(by_name[name].axes if name in by_name else ()), (name, partition)


@settings(max_examples=25)
@given(weight=cut_weights())
def test_slices_of_all_ranks_cover_each_buffer_and_overlap_only_where_it_says_so(weight):
    format, shape, axes = weight
    partition = infer_partition(format, axes, shape=shape)
    assert partition.buffers
    for buffer in partition.buffers:
        holders = torch.zeros(buffer.shape, dtype=torch.int64)
        for coordinate in coordinates(partition):
            holders[buffer.slices(partition.bounds(coordinate))] += 1
        assert holders.min() >= 1
        assert bool(holders.max() > 1) is bool(buffer.overlaps), buffer


# Buffers cut by the same rules


@st.composite
def flat_cuts(draw):
    """Return a weight that fills a bucket, and ranks that each own whole experts or whole rows."""
    format = draw(st.sampled_from(list(FORMATS.values())))
    multiple = max(format.dimension_multiple, 32)
    experts = draw(st.sampled_from([1, 2, 4]))
    rows, cols = (multiple * draw(st.integers(1, 10)) for _ in range(2))
    factors = [n for n in (1, 2, 3, 4, 8, 16, 32) if rows % n == 0 and rows // n % 2 == 0]
    return format, (experts, rows, cols), draw(st.sampled_from([1, experts])), factors


@settings(max_examples=25)
@given(weight=flat_cuts(), data=st.data())
def test_shards_of_a_bucket_are_a_cut_of_experts_and_then_of_rows(weight, data):
    """Exchanged maxima, whole block rows, and gathered bytes agree with the bucket layouts."""
    format, shape, cut_experts, factors = weight
    cut_rows = data.draw(st.sampled_from(factors)) if cut_experts == shape[0] else 1
    dp_size = cut_experts * cut_rows
    axes = {"experts": {"dp experts": cut_experts}, "rows": {"dp rows": cut_rows}}
    partition = infer_partition(format, axes, shape=shape)
    slot = Slot(name="fc1", start=0, shape=shape)
    shard = slot.numel // dp_size
    ranks = [partition.bounds(coordinate) for coordinate in coordinates(partition)]

    exchange = plan_exchange(format, shape, slot.cuts(shard))
    assert bool(exchange.block_rows) is (not partition.has_whole_blocks)
    assert cuts_block_rows(format, [slot], shard) is (not partition.has_whole_blocks)
    end = aligned_end(format, [slot], dp_size=dp_size)
    is_aligned = (end.unit, end.numel) == ("block_row", slot.numel)
    assert partition.has_whole_blocks or not is_aligned
    assert exchange.block_rows.keys() == {
        (expert, bounds["rows"].start // format.block_row_height * format.block_row_height)
        for bounds in ranks
        for expert in bounds["experts"]
        if bounds["rows"].start % format.block_row_height
    }
    cut_amaxes = partition.expert_amax.axes if format.has_global_amax else ()
    assert exchange.experts.keys() == (set(range(shape[0])) if cut_amaxes else set())

    for wire in plan_buffers(format, [slot], slot.numel, dp_size):
        buffer = partition.buffer(wire.name)
        if not wire.is_sliced:
            continue
        entries = torch.arange(prod(buffer.shape)).view(buffer.shape)
        memory = entries.view(-1).view(torch.uint8)
        for rank, bounds in enumerate(ranks):
            gathered = set(memory.chunk(dp_size)[rank].view(torch.int64).tolist())
            held = set(entries[buffer.slices(bounds)].flatten().tolist())
            assert gathered == held if not buffer.overlaps else gathered <= held


# What is refused

REFUSED = {
    "half a byte of columns": (
        (NVFP4, {"columns": {"tp": 32}}, (1, 16, 32)),
        LayoutError,
        r"^fc1: nvfp4 packs 2 columns into one byte of rowwise_data, expected parts of a multiple "
        r"of 2, got 1 columns for each of the 32 ranks of tp\. Cut into fewer parts",
    ),
    "half a byte of rows, transposed": (
        (NVFP4, {"rows": {"tp": 2, "fsdp": 8}}, (1, 16, 32)),
        LayoutError,
        r"^fc1: nvfp4 packs 2 rows into one byte of columnwise_data, .* got 1 rows for each of the "
        r"8 ranks of fsdp",
    ),
    "uneven rows": (
        (MXFP8, {"rows": {"tp": 2, "fsdp": 5}}, (1, 64, 32)),
        LayoutError,
        r"^fc1: expected equal parts, got 32 rows for the 5 ranks of fsdp\. Cut by a divisor of 32",
    ),
    "uneven experts": (
        ("bf16", {"experts": {"ep": 3}}, (4, 64, 32)), LayoutError,
        "equal parts, got 4 experts for the 3 ranks of ep"),
    "a shape the format cannot hold": (
        (MXFP8, {}, (1, 48, 32)), LayoutError,
        r"^fc1: mxfp8 needs rows and columns divisible by 32, got \[48, 32\]"),
    "a shape of two sizes": (("bf16", {}, (64, 32)), LayoutError, r"^fc1: .*\[64, 32\]"),
    "an axis that cuts twice": (
        (MXFP8, {"rows": {"tp": 2}, "columns": {"tp": 2}}, (1, 64, 64)), ConfigError,
        "expected each mesh axis once, with one rank or more, got tp: 2 for columns. Flatten"),
    "an axis without ranks": (
        (MXFP8, {"rows": {"tp": 0}}, (1, 64, 64)), ConfigError,
        "one rank or more, got tp: 0 for rows"),
    "an unknown dimension": (
        (MXFP8, {"cols": {"tp": 2}}, (1, 64, 64)), ConfigError,
        "expected experts, rows, columns, got cols"),
    "an unknown format": (("mxfp6", {}, (1, 64, 64)), ConfigError, "got 'mxfp6'"),
}  # fmt: skip


@pytest.mark.parametrize(("cut", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_refused_with_a_reason(cut, error, message):
    format, axes, shape = cut
    with pytest.raises(error, match=message):
        infer_partition(format, axes, shape=shape, name="fc1")


@pytest.mark.parametrize(
    "coordinate",
    [{}, {"tp": 0}, {"tp": 0, "fsdp": 4}, {"tp": -1, "fsdp": 0}, {"tp": 0, "fsdp": 0, "pp": 0}],
    ids=str,
)
def test_a_coordinate_names_every_axis_and_no_other(coordinate):
    partition = infer_partition(MXFP8, {"rows": {"tp": 2, "fsdp": 4}}, shape=SHAPE)
    with pytest.raises(LayoutError, match="place for each of tp: 2, fsdp: 4, below its number"):
        partition.bounds(coordinate)
