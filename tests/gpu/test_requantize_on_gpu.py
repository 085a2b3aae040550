"""One launch requantizes whole tables on a GPU, byte for byte as the reference, in every format."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.formats import (
    DIRECTIONS,
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    MXFP8,
    NVFP4,
    QuantizedWeight,
    reference,
    round_up,
)
from moe_optim.kernels.member_table import MemberTable, TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.inputs import SENTINEL, poisoned, wide_range_weights, with_specials
from tests.support.number_formats.special_values import (
    SPECIAL_CASES,
    assert_special_case,
    special_weight,
)
from tests.support.steps.launches import assert_neither_allocates_nor_waits
from tests.test_ops import assert_written, expected_buffers, rewrite, rewrite_in_shards

pytestmark = pytest.mark.gpu

WHOLE_TILES = ((3, 128, 256), (1, 128, 512), (2, 256, 256))
MIXED = ((2, 64, 96), (1, 32, 32), (3, 256, 1408), (1, 32, 2048), (2, 160, 64))
EDGES = ((2, 130, 40), (1, 7, 129), (1, 1, 1), (2, 300, 515), (1, 128, 136))  # FP8 blocks only
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
STORED = {name: format for name, format in FORMATS.items() if not format.is_row_only}
"""Formats whose scales Transformer Engine stores."""
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


def fitted(format, shapes):
    """Return shapes of whole blocks; of row-only formats also with rows beyond whole tiles."""
    more = 3 if format.is_row_only else 0
    return [
        (experts, rows + more * (rows % 128 > 0), round_up(cols, format.dimension_multiple))
        for experts, rows, cols in shapes
    ]


def lay_out(masters, dtype, gap=64, format=MXFP8):
    """Return flat memory with every master in it, gaps full of ones, and the entries."""
    masters = [master.to(dtype).cuda() for master in masters]
    size = sum(master.numel() for master in masters) + gap * (len(masters) + 1)
    memory = torch.ones(size, dtype=dtype, device="cuda")
    entries, start = [], gap
    for index, master in enumerate(masters):
        source = memory[start : start + master.numel()].view(master.shape).copy_(master)
        target = poisoned(format, tuple(master.shape), "cuda")
        entries.append(TableEntry(parameter=f"fc{index}", source=source, target=target))
        start += master.numel() + gap
    return memory, entries


def random_masters(shapes, seed=0):
    return [wide_range_weights(*shape, seed=seed + index) for index, shape in enumerate(shapes)]


def all_in_kernels(table):
    return not table.remainder and len(table.finish.kernels) == len(table.finish.calls)


SHAPE_SETS = {"whole tiles": WHOLE_TILES, "mixed": MIXED}
CASES = {
    f"{format.name} {name}": (format, fitted(format, shapes))
    for format in FORMATS.values()
    for name, shapes in SHAPE_SETS.items()
} | {f"{format.name} edges": (format, EDGES) for format in (FP8_BLOCK, FP8_BLOCK_FP32)}


@DTYPES
@pytest.mark.parametrize("gap", [64, 8, 1], ids=["aligned", "16 bytes", "unaligned"])
@pytest.mark.parametrize(("format", "shapes"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("zero", [False, True], ids=["keep", "zero"])
def test_one_launch_equals_the_reference(dtype, gap, format, shapes, zero):
    memory, entries = lay_out(random_masters(shapes), dtype, gap, format)
    expected, before = expected_buffers(entries), memory.clone()
    table = MemberTable.build(entries, consumed=memory if zero else None)
    assert (len(table.launches), table.zeroes_in_launch) == (1, zero)
    assert all_in_kernels(table)
    rewrite(table)
    assert_written(entries, expected)
    assert_bytes_equal(memory, torch.zeros_like(memory) if zero else before, what="sources")


@pytest.mark.parametrize("format", FORMATS)
def test_the_hand_derived_bytes_of_special_values(format):
    """The named table, all cases of a format in one launch, in fp32."""
    cases = [case for case in SPECIAL_CASES.values() if case.format == format]
    assert cases
    masters = [special_weight(case) for case in cases]
    entries = lay_out(masters, torch.float32, format=FORMATS[format])[1]
    rewrite(MemberTable.build(entries))
    for case, entry in zip(cases, entries, strict=True):
        assert_special_case(case, entry.target)


@DTYPES
@EVERY_FORMAT
def test_special_values_among_others_equal_the_reference(dtype, format):
    """NaN, infinities, zeros, subnormals, extremes, and neighbours of powers of two as an amax."""
    largest = torch.finfo(torch.bfloat16).max
    finite = wide_range_weights(2, 128, 384)
    master = with_specials(finite)
    without_inf = with_specials(finite, specials=(0.0, -0.0, torch.nan, 2.0**-133, largest))
    powers = torch.exp2(torch.arange(-133, 128).double())
    amaxes = torch.cat([powers, powers * (1 + 2**-7), powers * 1.75, powers * (2 - 2**-7)])
    amaxes = amaxes.clamp(max=largest).float()
    width = max(32, format.dimension_multiple)
    ladder = wide_range_weights(1, 128 * 9, width, exponents=(-2, 0)).clamp(-1, 1)
    ladder[0, : amaxes.numel(), 7] = 1.0
    ladder[0, : amaxes.numel()] *= amaxes[:, None]
    steps = ladder[0, : amaxes.numel(), None].expand(-1, 32, width).contiguous()
    entries = lay_out(
        [master, without_inf, ladder, ladder.transpose(1, 2), steps], dtype, format=format
    )[1]
    expected = expected_buffers(entries)
    rewrite(MemberTable.build(entries))
    assert_written(entries, expected)


@EVERY_FORMAT
def test_every_bf16_value_equals_the_reference(format):
    """Each of the 65,536 bit patterns, among its neighbours and as the amax of its block."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    width = max(32, format.dimension_multiple)
    blocks = torch.zeros(1 << 16, 32, width, dtype=torch.bfloat16)
    blocks[:, 3, 5] = values
    few = blocks[:: 1 if format is MXFP8 else 16].contiguous()
    entries = lay_out([values.view(1, 256, 256), few], torch.bfloat16, format=format)[1]
    expected = expected_buffers(entries)
    rewrite(MemberTable.build(entries))
    assert_written(entries, expected)


# Shards


def shard_tables(masters, format, dtype, cuts_of):
    """Return one table a rank; all ranks write into the same buffers, as if they were gathered."""
    targets = [poisoned(format, tuple(master.shape), "cuda") for master in masters]
    flats = [master.to(dtype).cuda().flatten() for master in masters]
    cuts = [tuple(cuts_of(flat.numel())) for flat in flats]
    tables = []
    for rank in range(len(cuts[0]) + 1):
        entries = []
        for index, (flat, target) in enumerate(zip(flats, targets, strict=True)):
            start, end = (0, *cuts[index], flat.numel())[rank : rank + 2]
            source = flat[start:end].clone()
            entries.append(
                TableEntry(
                    parameter=f"fc{index}",
                    source=source,
                    target=target,
                    start=start,
                    cuts=cuts[index],
                )
            )
        tables.append(MemberTable.build(entries))
    return tables


def assert_shards_equal_the_whole(masters, format, dtype, cuts_of):
    tables = shard_tables(masters, format, dtype, cuts_of)
    assert all(map(all_in_kernels, tables))
    rewrite_in_shards(tables)
    wholes = [reference.quantize(master.to(dtype).cuda(), format).buffers() for master in masters]
    assert_written(tables[0].entries, wholes)


@DTYPES
@EVERY_FORMAT
def test_shards_equal_the_whole_weight(dtype, format):
    """Cut inside of blocks, rows and experts; at multiples of 16 bytes, and not."""
    shapes = fitted(format, MIXED)
    shapes += EDGES[::3] if format.dimension_multiple == 1 else ()
    masters = [with_specials(master) for master in random_masters(shapes)]
    for cuts_of in (
        lambda numel: (numel // 6 * 2, numel // 3 * 2),
        lambda numel: (numel // 64 * 16, numel // 64 * 48),
        lambda numel: (2, 4, numel // 2 // 2 * 2, numel - 2),
    ):
        assert_shards_equal_the_whole(masters, format, dtype, cuts_of)


@st.composite
def sharded_weights(draw):
    format = draw(st.sampled_from(list(FORMATS.values())))
    rows = 32 * draw(st.integers(1, 9))
    cols = max(32, format.dimension_multiple) * draw(st.integers(1, 9))
    if format.dimension_multiple == 1 or format.is_row_only:
        rows += draw(st.integers(0, 140))
    if format.dimension_multiple == 1:
        cols += draw(st.integers(0, 140))
    experts = draw(st.integers(1, 3))
    units = experts * rows * cols // format.elements_per_byte
    cuts = draw(st.sets(st.integers(1, units - 1), max_size=5, min_size=1))
    return format, (experts, rows, cols), sorted(format.elements_per_byte * cut for cut in cuts)


@settings(max_examples=150)
@given(weight=sharded_weights(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_shards_of_any_shape_and_cut_equal_the_whole_weight(weight, dtype):
    format, shape, cuts = weight
    assert_shards_equal_the_whole([wide_range_weights(*shape)], format, dtype, lambda _: cuts)


# Buffers and storage


@pytest.mark.parametrize("format", STORED.values(), ids=STORED)
def test_scales_in_storage_equal_the_references_and_keep_their_padding(format):
    entries = []
    for index, shape in enumerate(WHOLE_TILES + MIXED):
        scales = {}
        for direction in DIRECTIONS:
            size = (shape[0], *format.storage_scale_shape(*shape[1:], direction))
            scales[direction] = torch.full(size, 7, dtype=format.scale_dtype, device="cuda")
        source = wide_range_weights(*shape, seed=index).cuda()
        target = poisoned(format, shape, "cuda")
        entries.append(
            TableEntry(parameter=f"fc{index}", source=source, target=target, storage_scales=scales)
        )
    table = MemberTable.build(entries)
    assert all_in_kernels(table)
    assert len(table.finish.kernels) == 1
    rewrite(table)
    for entry in entries:
        q = reference.quantize(entry.source, format)
        for direction, scale in entry.storage_scales.items():
            expected = torch.full_like(scale, 7)
            reference.expand_scale_into(q, direction, expected)
            assert_bytes_equal(scale, expected, what=f"{entry.parameter} {direction}")


@EVERY_FORMAT
@pytest.mark.parametrize("padding", [24, 32], ids=["odd", "aligned"])
def test_padded_buffers_keep_their_padding(format, padding):
    (shape,) = fitted(format, [(2, 64, 160)])
    memories, views = {}, {}
    for name, buffer in poisoned(format, shape, "cuda").buffers().items():
        if buffer.dim() == 1:
            views[name] = buffer
            continue
        experts, rows, cols = buffer.shape
        memory = buffer.new_empty((experts, rows + 4, cols + padding))
        memory.view(torch.uint8).fill_(SENTINEL)
        memories[name], views[name] = memory, memory[:, :rows, :cols]
    target = QuantizedWeight.of_buffers(format, shape, views.values())
    source = wide_range_weights(*shape).cuda()
    entry = TableEntry(parameter="fc1", source=source, target=target)
    rewrite(MemberTable.build([entry]))
    assert_written([entry], expected_buffers([entry]))
    for name, memory in memories.items():
        views[name].view(torch.uint8).fill_(SENTINEL)
        assert (memory.view(torch.uint8) == SENTINEL).all()


# Tables


def test_formats_and_dtypes_share_a_table():
    """One launch a format and dtype; memory that several of them consume is zeroed at the end."""
    formats = list(FORMATS.values())
    memory, entries = lay_out(random_masters(MIXED), torch.bfloat16)
    entries = [
        replace(entry, target=poisoned(formats[i % 4], tuple(entry.source.shape), "cuda"))
        for i, entry in enumerate(entries)
    ]
    entries += lay_out(random_masters(WHOLE_TILES), torch.float32, format=NVFP4)[1]
    expected = expected_buffers(entries)
    table = MemberTable.build(entries, consumed=memory)
    assert (len(table.launches), table.zeroes_in_launch) == (5, False)
    rewrite(table)
    assert_written(entries, expected)
    assert not memory.any()


def test_sources_that_moved_are_noticed_and_read_by_a_new_table():
    """Gradient memory is freed between steps to make room, and taken again somewhere else."""
    memory, entries = lay_out(random_masters(MIXED), torch.bfloat16)
    table = MemberTable.build(entries, consumed=memory)
    address, storage = memory.data_ptr(), memory.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    in_the_way = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    storage.resize_(num_bytes)
    assert memory.data_ptr() != address
    memory.copy_(wide_range_weights(memory.numel()))
    expected = expected_buffers(entries)
    assert table.has_moved
    MemberTable.build(entries, consumed=memory).launch()
    assert_written(entries, expected)
    assert not memory.any()
    assert in_the_way.all()


@EVERY_FORMAT
def test_a_captured_graph_requantizes_new_values(format):
    memory, entries = lay_out(random_masters(fitted(format, MIXED)), torch.bfloat16, format=format)
    table = MemberTable.build(entries, consumed=memory)
    rewrite(table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rewrite(table)
    for seed in range(2):
        memory.copy_(wide_range_weights(memory.numel(), seed=seed))
        expected = expected_buffers(entries)
        graph.replay()
        assert_written(entries, expected)
        assert not memory.any()


@EVERY_FORMAT
def test_a_launch_allocates_nothing_and_does_not_wait(format):
    """Shards that cut blocks included: neither before nor after their exchange."""
    memory, entries = lay_out(random_masters(fitted(format, MIXED)), torch.bfloat16, format=format)
    table = MemberTable.build(entries, consumed=memory)
    masters = random_masters(fitted(format, MIXED))
    cut = shard_tables(masters, format, torch.float32, lambda numel: (numel // 6 * 2,))[0]

    def step():
        rewrite(table)
        cut.find_maxima.launch()
        cut.encode.launch()

    assert_neither_allocates_nor_waits(step)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("format", REPRESENTATIVE_FORMATS.values(), ids=REPRESENTATIVE_FORMATS)
def test_a_weight_of_more_than_2_31_elements(format):
    """Its ends are compared: tiles on both sides of the 31-bit boundary, and the last rows."""
    free, _ = torch.cuda.mem_get_info()
    if free < 24e9:
        pytest.skip(f"needs 24 GB of GPU memory, found {free / 1e9:.0f} GB")
    rows, cols = (1 << 31) // 4096 + 128, 4096
    memory = torch.ones(rows * cols + 8192, dtype=torch.bfloat16, device="cuda")
    source = memory[: rows * cols].view(1, rows, cols)
    parts = [slice(0, 128), slice(rows - 256, rows)]
    for seed, part in enumerate(parts):
        values = wide_range_weights(*source[:, part].shape, seed=seed)
        values[0, 0, 0] = 2.0**60  # the amax of NVFP4 is that of the whole weight
        source[:, part] = values.cuda()
    expected = [reference.quantize(source[:, part], format) for part in parts]
    target = poisoned(format, tuple(source.shape), "cuda")
    entry = TableEntry(parameter="fc1", source=source, target=target)
    table = MemberTable.build([entry], consumed=memory)
    assert all_in_kernels(table)
    rewrite(table)
    for part, want in zip(parts, expected, strict=True):
        for name, buffer in want.buffers().items():
            got = target.buffers()[name]
            for axis in (1, 2):  # the one along the rows of the weight
                if got.dim() == 3 and got.shape[axis] != buffer.shape[axis]:
                    per_row = buffer.shape[axis] / (part.stop - part.start)
                    got = got.narrow(axis, int(part.start * per_row), buffer.shape[axis])
            assert_bytes_equal(got, buffer, what=f"{part} {name}")
    assert not memory.view(torch.int64).any()
