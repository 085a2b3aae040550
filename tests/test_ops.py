"""One launch writes every storage of a table, with the bytes of one by one, and tidies up."""

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_optim
from moe_optim.errors import ConfigError, LayoutError, MoEOptimError
from moe_optim.formats import (
    DIRECTIONS,
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    QuantizedWeight,
    reference,
    round_up,
)
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.weights.storage import PortableStorage
from tests.support.bytes import assert_bytes_equal
from tests.support.formats import fitting
from tests.support.inputs import SENTINEL, poisoned, wide_range_weights, with_specials
from tests.support.number_formats.gather import make_buffers
from tests.support.ptx.launches import plan_kernels

MIXED = (  # parameters of one launch
    (MXFP8, (2, 64, 96)),
    (NVFP4, (3, 32, 16)),
    (MXFP8, (1, 32, 32)),
    (FP8_BLOCK, (2, 130, 40)),
    (MXFP8_2D, (4, 32, 64)),
)
STORED = {name: format for name, format in FORMATS.items() if not format.is_row_only}
"""Formats whose scales Transformer Engine stores."""
GAP = 24
"""Elements between the sources of two parameters, and before and after them all."""


def lay_out(parameters, dtype=torch.bfloat16, seed=0):
    """Return flat memory full of values and a table entry for each parameter within it."""
    numels = [shape[0] * shape[1] * shape[2] for _, shape in parameters]
    memory = wide_range_weights(sum(numels) + GAP * (len(parameters) + 1), seed=seed).to(dtype)
    entries, start = [], GAP
    for index, ((format, shape), numel) in enumerate(zip(parameters, numels, strict=True)):
        source = memory[start : start + numel].view(shape)
        entries.append(
            TableEntry(parameter=f"fc{index}", source=source, target=poisoned(format, shape))
        )
        start += numel + GAP
    return memory, entries


def rewrite(table):
    """Write what travels, and derive the rest, as on one rank."""
    table.launch()
    table.finish.launch()


def expected_buffers(entries):
    return [reference.quantize(entry.source, entry.target.format).buffers() for entry in entries]


def assert_written(entries, expected):
    for entry, buffers in zip(entries, expected, strict=True):
        for name, buffer in entry.target.buffers().items():
            what = f"{entry.parameter} {entry.target.format.name} {entry.target.shape} {name}"
            assert_bytes_equal(buffer, buffers[name], what=what)


def test_the_reference_does_without_kernels_where_these_run(monkeypatch):
    """Whatever device the weights are on: a table is built with launches, or without."""
    plan_kernels(monkeypatch)
    _, entries = lay_out(MIXED, torch.float32)
    table = MemberTable.build(entries)
    assert table.launches and table.kernels and table.finish.kernels
    table = MemberTable.build(entries, backend="reference")
    assert not (table.launches or table.kernels or table.finish.kernels)
    assert len(table.remainder) == len(entries)
    expected = expected_buffers(entries)
    rewrite(table)
    assert_written(entries, expected)


@settings(max_examples=25)
@given(
    parameters=st.lists(
        st.tuples(
            st.sampled_from(list(FORMATS.values())),
            st.tuples(
                st.integers(0, 3), st.sampled_from([0, 32, 64]), st.sampled_from([32, 96, 128])
            ),
        ),
        max_size=4,
    ),
    seed=st.integers(0, 2**31),
    zero=st.booleans(),
)
def test_any_table_equals_one_by_one_and_zeroes_its_memory(parameters, seed, zero):
    """With positive zeros, gaps included, where asked: what follows may accumulate gradients
    there. Else sources are left alone."""
    parameters = [(format, fitting(format, shape)) for format, shape in parameters]
    memory, entries = lay_out(parameters, seed=seed)
    memory[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])  # in the first gap
    expected, before = expected_buffers(entries), memory.clone()
    rewrite(MemberTable.build(entries, consumed=memory if zero else None))
    assert_written(entries, expected)
    assert_bytes_equal(memory, torch.zeros_like(memory) if zero else before, what="memory")


BAD_SOURCES = {  # for a target [2, 64, 32]
    "one expert too few": (
        torch.zeros(1, 64, 32),
        "from one cut to the next, got elements 0 to 2048",
    ),
    "as one matrix": (torch.zeros(128, 32), r"shape \[2, 64, 32\], got \[128, 32\]"),
    "transposed shape": (torch.zeros(2, 32, 64), r"shape \[2, 64, 32\], got \[2, 32, 64\]"),
    "fp16": (torch.zeros(2, 64, 32).half(), r"fp32 or bf16 source, got torch\.float16"),
    "fp64": (torch.zeros(2, 64, 32).double(), r"fp32 or bf16 source, got torch\.float64"),
    "bytes": (torch.zeros(2, 64, 32, dtype=torch.uint8), r"got torch\.uint8"),
    "strided": (torch.zeros(2, 32, 64).transpose(1, 2), r"contiguous .* strides \[2048, 1, 64\]"),
    "on another device": (torch.zeros(2, 64, 32, device="meta"), r"one device, got meta and cpu"),
}


@pytest.mark.parametrize(("source", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_a_bad_source_is_refused_by_name_when_the_table_is_built(source, message):
    good = lay_out(MIXED)[1]
    bad = TableEntry(
        parameter="layers.1.fc2.weight", source=source, target=poisoned(MXFP8, (2, 64, 32))
    )
    with pytest.raises(LayoutError, match=rf"^layers\.1\.fc2\.weight: expected .*{message}"):
        MemberTable.build([*good, bad])


def test_all_values_may_come_flat_and_from_other_memory_each_time():
    """As a master that is all of its weight lies there, and as offloading exchanges its memory."""
    source, target = torch.zeros(2 * 64 * 32), poisoned(MXFP8, (2, 64, 32))
    table = MemberTable.build([TableEntry(parameter="fc1", source=source, target=target)])
    for seed in (1, 2):
        values = wide_range_weights(2, 64, 32, seed=seed)
        source.data = values.flatten()
        table.launch()
        for name, buffer in reference.quantize(values, MXFP8).buffers().items():
            assert_bytes_equal(target.buffers()[name], buffer, what=name)


# Shards: every rank writes its range, and together they write the weight


def cut_at(master, format, cuts, dtype=torch.float32, target=None):
    """Return one table a rank. They share a target, as if their buffers had been gathered."""
    target = target or poisoned(format, tuple(master.shape))
    ends = [0, *cuts, master.numel()]
    flat = master.to(dtype).flatten()
    return target, [
        MemberTable.build(
            [
                TableEntry(
                    parameter="fc1",
                    source=flat[start:end].clone(),
                    target=target,
                    start=start,
                    cuts=tuple(cuts),
                )
            ]
        )
        for start, end in zip(ends, ends[1:], strict=False)
    ]


def rewrite_in_shards(tables):
    """Do what ranks do: maxima of all of them, one reduction, codes, a gather, what is derived."""
    for table in tables:
        table.find_maxima.launch()
    largest = torch.stack([table.exchange for table in tables]).amax(0)
    for table in tables:
        table.exchange.copy_(largest)
        table.encode.launch()
    tables[0].finish.launch()


def assert_buffers_equal(target, master, what=""):
    for name, buffer in reference.quantize(master, target.format).buffers().items():
        assert_bytes_equal(
            target.buffers()[name], buffer, what=f"{what} {target.format.name} {name}"
        )


@st.composite
def sharded_weights(draw):
    format = draw(st.sampled_from(list(FORMATS.values())))
    rows, cols = (draw(st.sampled_from([32, 64, 96])) for _ in range(2))
    if format.dimension_multiple == 1 or format.is_row_only:
        rows += draw(st.integers(0, 140))
    if format.dimension_multiple == 1:
        cols += draw(st.integers(0, 140))
    shape = fitting(format, (draw(st.integers(1, 3)), rows, cols))
    packed = format.elements_per_byte
    numel = prod(shape)
    cuts = draw(st.sets(st.integers(1, numel // packed - 1), min_size=1, max_size=5))
    return format, shape, sorted(packed * cut for cut in cuts)


@settings(max_examples=40)
@given(weight=sharded_weights(), seed=st.integers(0, 2**31), wide=st.booleans())
def test_shards_cut_anywhere_equal_the_whole_weight(weight, seed, wide):
    """Inside of a block, a row or an expert, or several times in one block row: data and scales."""
    format, shape, cuts = weight
    master = wide_range_weights(*shape, seed=seed, exponents=(-40, 40) if wide else (-2, 2))
    target, tables = cut_at(master, format, cuts)
    rewrite_in_shards(tables)
    assert_buffers_equal(target, master, what=f"cut at {cuts}:")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_special_values_on_both_sides_of_a_cut(format):
    shape = fitting(format, (2, 64, 96))
    master, cols = with_specials(wide_range_weights(*shape), every=7), shape[2]
    target, tables = cut_at(master, format, [cols * 40 + 10, cols * 64, cols * 70])
    rewrite_in_shards(tables)
    assert_buffers_equal(target, master)


def test_a_shard_writes_nothing_that_belongs_to_others():
    """Data of its own elements, scales of its own block rows, and not a byte besides."""
    for format in FORMATS.values():
        shape = fitting(format, (2, 256, 32))
        cols = shape[2]
        target, tables = cut_at(wide_range_weights(*shape), format, [cols * 140, cols * 300])
        for table in tables:
            table.find_maxima.launch()
        tables[1].encode.launch()
        data = target.rowwise_data.view(-1, cols // format.elements_per_byte)
        assert (data[:140] == SENTINEL).all()
        assert (data[300:] == SENTINEL).all()
        assert not (data[140:300] == SENTINEL).all(1).any()
        untouched = target.rowwise_scale.view(torch.uint8)
        assert (untouched[0, 0] == SENTINEL).all()
        assert (untouched[1, -1] == SENTINEL).all()


def test_shards_that_cut_blocks_are_not_requantized_without_an_exchange():
    target, tables = cut_at(wide_range_weights(1, 64, 32), MXFP8, [1000])
    with pytest.raises(LayoutError, match="64 maxima that several ranks share. Launch"):
        tables[0].launch()
    assert (target.rowwise_data == SENTINEL).all()


BAD_RANGES = {  # start, length, cuts of a weight [2, 64, 32]
    "an end that is no cut": (0, 1000, (), "got elements 0 to 1000 between cuts at"),
    "a cut inside": (0, 2000, (1000, 2000), "got elements 0 to 2000 between cuts"),
    "too long": (4000, 100, (4000,), r"got \[100\] from element 4000 on"),
    "a cut at the end": (0, 4096, (4096,), r"inside of \[2, 64, 32\] .* got 4096"),
}


@pytest.mark.parametrize(
    ("start", "length", "cuts", "message"), BAD_RANGES.values(), ids=BAD_RANGES.keys()
)
def test_a_range_that_does_not_fit_is_refused_by_name(start, length, cuts, message):
    source, target = torch.zeros(length), poisoned(MXFP8, (2, 64, 32))
    entry = TableEntry(
        parameter="layers.1.fc2", source=source, target=target, start=start, cuts=cuts
    )
    with pytest.raises(LayoutError, match=rf"^layers\.1\.fc2: expected .*{message}"):
        MemberTable.build([entry])


# Buffers that travel, and storage as Transformer Engine pads it

DERIVED = {
    "quantized": set(),
    "shared": {"columnwise_scale"},
    "transposed": {"columnwise_data", "columnwise_scale"},
    "none": set(),
}
"""Buffers that are not gathered, by what a format does with its columnwise copy."""


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_requantizing_writes_what_travels_and_finishing_the_rest(format):
    """Two weights side by side in every buffer that is gathered, as they lie in a bucket."""
    masters = [wide_range_weights(2, 128, 256), wide_range_weights(1, 256, 128, seed=1)]
    buffers, views = make_buffers(format, [tuple(master.shape) for master in masters])
    entries = []
    for index, master in enumerate(masters):
        target = replace(poisoned(format, tuple(master.shape)), **views[index])
        entries.append(TableEntry(parameter=f"fc{index}", source=master, target=target))
    table = MemberTable.build(entries)
    table.launch()
    for entry in entries:
        kept = entry.target.buffers().keys() - entry.target.gathered_buffers().keys()
        assert kept == DERIVED[format.columnwise_copy]
        for name in kept:
            assert (entry.target.buffers()[name].view(torch.uint8) == SENTINEL).all()
    table.finish.launch()
    for entry, master in zip(entries, masters, strict=True):
        assert_buffers_equal(entry.target, master)
    for name, buffer in buffers.items():
        parts = [reference.quantize(m, format).buffers()[name] for m in masters]
        expected = torch.cat([part.flatten().view(torch.uint8) for part in parts])
        assert_bytes_equal(buffer, expected, what=name)


@pytest.mark.parametrize("format", STORED.values(), ids=STORED)
def test_scales_in_storage_are_padded_and_repeated_as_transformer_engine_does(format):
    """One scale a line of a block along the axes of the data, in the upper left; nothing beyond."""
    shape = (2, 96, 160)
    master = wide_range_weights(*shape)
    target = poisoned(format, shape)
    scales = {}
    for direction in DIRECTIONS:
        size = (2, *format.storage_scale_shape(*shape[1:], direction))
        scales[direction] = torch.full(size, 77, dtype=format.scale_dtype)
    entry = TableEntry(parameter="fc1", source=master, target=target, storage_scales=scales)
    table = MemberTable.build([entry])
    table.launch()
    table.finish.launch()
    for direction, stored in scales.items():
        rows, cols = (160, 96) if format.transposes(direction) else (96, 160)
        length = max(format.rowwise_block)
        one_d = format.columnwise_copy == "quantized"
        if format in (FP8_BLOCK, FP8_BLOCK_FP32):
            lines = [(128, 128)]
        elif direction == "columnwise" and not format.transposes(direction):
            lines = [(length, 1)]
        else:
            lines = [(1, length)]
        ((down, across),) = lines
        expected = torch.full_like(stored, 77)
        block = format.block(direction) if one_d else format.rowwise_block
        logical = target.columnwise_scale if one_d and direction == "columnwise" else None
        if logical is None:
            logical = target.rowwise_scale
            if format.transposes(direction):
                logical = logical.transpose(1, 2)
        for i in range(-(-rows // down)):
            for j in range(-(-cols // across)):
                value = logical[:, i * down // block[0], j * across // block[1]]
                expected[:, i, j] = value
        assert_bytes_equal(stored, expected, what=f"{format.name} {direction}")


# One line for tensors that somebody holds


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_quantize_gives_the_oracles_bytes_and_dequantize_its_values(format, dtype):
    """Of a stack of experts, of one expert, and of several tensors of several shapes at once."""
    shapes = [(3, 64, 96), (32, 32), (2, 32, 160)]
    shapes = [(*rows, round_up(cols, format.dimension_multiple)) for *rows, cols in shapes]
    weights = [wide_range_weights(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    for weight, quantized in zip(weights, moe_optim.quantize(weights, format.name), strict=True):
        stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
        expected = reference.quantize(stack, format)
        for got in (quantized, moe_optim.quantize(weight, format)):
            for name, buffer in expected.buffers().items():
                assert_bytes_equal(got.buffers()[name], buffer, what=name)
            for direction in DIRECTIONS:
                values = reference.dequantize(expected, direction).bfloat16()
                assert_bytes_equal(moe_optim.dequantize(got, direction), values, what=direction)


def test_quantize_overwrites_the_buffers_it_is_given():
    first, second = (wide_range_weights(2, 32, 64, seed=seed) for seed in (1, 2))
    buffers = moe_optim.quantize(first, "mxfp8")
    places = [buffer.data_ptr() for buffer in buffers.buffers().values()]
    assert (
        moe_optim.quantize(
            second.transpose(1, 2).contiguous().transpose(1, 2), "mxfp8", out=buffers
        )
        is buffers
    )
    assert [buffer.data_ptr() for buffer in buffers.buffers().values()] == places
    for name, buffer in reference.quantize(second, MXFP8).buffers().items():
        assert_bytes_equal(buffers.buffers()[name], buffer, what=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_view_that_only_negates_is_read_negated(dtype):
    """As the imaginary part of conjugates: contiguous, over memory with the other signs."""
    values = wide_range_weights(2, 32, 64).to(dtype)
    negated = torch._neg_view(-values)
    storage = PortableStorage(MXFP8, (2, 32, 64), record_amax=True)
    storage.write(negated)
    for quantized in moe_optim.quantize(negated, "mxfp8"), storage.quantized:
        for name, buffer in reference.quantize(values, MXFP8).buffers().items():
            assert_bytes_equal(quantized.buffers()[name], buffer, what=name)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_weights_on_meta_give_buffers_on_meta(format):
    whole = moe_optim.quantize(torch.empty(2, 128, 256), format)
    on_meta = moe_optim.quantize(torch.empty(2, 128, 256, device="meta"), format)
    for name, buffer in on_meta.buffers().items():
        expected = whole.buffers()[name]
        assert buffer.is_meta and (buffer.shape, buffer.dtype) == (expected.shape, expected.dtype)
    assert moe_optim.dequantize(on_meta).is_meta


def test_another_direction_has_no_values():
    quantized = moe_optim.quantize(torch.zeros(1, 32, 32), "mxfp8")
    with pytest.raises(ConfigError, match="^direction: expected rowwise or columnwise, got 'rows'"):
        moe_optim.dequantize(quantized, "rows")


NOT_QUANTIZED = {
    "unknown backend": (
        torch.zeros(1, 32, 32),
        {"backend": "x"},
        "^backend: expected auto or reference, got 'x'",
    ),
    "shape": (torch.zeros(1, 33, 32), {}, r"^weights: mxfp8 needs .* got \[33, 32\]"),
    "dtype": (
        torch.zeros(1, 32, 32).half(),
        {},
        r"^weights: .*fp32 or bf16 source, got torch.float16",
    ),
    "two devices": (
        [torch.zeros(32, 32), torch.zeros(32, 32, device="meta")],
        {},
        "^quantize: weights: expected tensors on one device, got cpu, meta",
    ),
    "out of another shape": (
        torch.zeros(1, 32, 32),
        {"out": QuantizedWeight.empty(MXFP8, (1, 32, 64))},
        r"^quantize: out: expected buffers of mxfp8 \[1, 32, 32\], got mxfp8 \[1, 32, 64\]",
    ),
}


@pytest.mark.parametrize(
    ("weights", "options", "message"), NOT_QUANTIZED.values(), ids=NOT_QUANTIZED
)
def test_what_cannot_be_quantized_is_refused_by_name(weights, options, message):
    with pytest.raises(MoEOptimError, match=message):
        moe_optim.quantize(weights, **{"format": "mxfp8", **options})
