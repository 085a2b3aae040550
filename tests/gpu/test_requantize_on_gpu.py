"""One launch requantizes whole tables on a GPU, byte for byte as the reference, at memory speed."""

import math

import pytest
import torch

from moe_optim import ops, reference
from moe_optim.formats import FP8_BLOCK, MXFP8, NVFP4, QuantizedWeight
from moe_optim.kernels.member_table import MemberTable, TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import SENTINEL, wide_range_weights, with_specials

pytestmark = pytest.mark.gpu

WHOLE_TILES = ((3, 64, 256), (1, 32, 128), (2, 96, 384))
MIXED = ((2, 64, 96), (1, 32, 32), (3, 256, 1408), (1, 32, 2048), (2, 160, 64))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def poisoned(format, shape):
    q = QuantizedWeight.empty(format, shape, device="cuda")
    for plane in q.planes().values():
        plane.view(torch.uint8).fill_(SENTINEL)
    return q


def lay_out(masters, dtype, gap=64, format=MXFP8):
    """Return flat memory with every master in it, gaps full of ones, and the entries."""
    masters = [master.to(dtype).cuda() for master in masters]
    size = sum(master.numel() for master in masters) + gap * (len(masters) + 1)
    memory = torch.ones(size, dtype=dtype, device="cuda")
    entries, start = [], gap
    for index, master in enumerate(masters):
        source = memory[start : start + master.numel()].view(master.shape).copy_(master)
        target = poisoned(format, tuple(master.shape))
        entries.append(TableEntry(parameter=f"fc{index}", source=source, target=target))
        start += master.numel() + gap
    return memory, entries


def random_masters(shapes, seed=0):
    return [wide_range_weights(*shape, seed=seed + index) for index, shape in enumerate(shapes)]


def expected_planes(entries):
    return [reference.quantize(entry.source, entry.target.format).planes() for entry in entries]


def assert_written(entries, expected):
    for entry, planes in zip(entries, expected, strict=True):
        for name, plane in entry.target.planes().items():
            what = f"{entry.parameter} {entry.target.shape} {name}"
            assert_bytes_equal(plane, planes[name], what=what)


@DTYPES
@pytest.mark.parametrize("gap", [64, 8, 1], ids=["aligned", "16 bytes", "unaligned"])
@pytest.mark.parametrize("shapes", [WHOLE_TILES, MIXED], ids=["whole tiles", "mixed"])
@pytest.mark.parametrize("zero", [False, True], ids=["keep", "zero"])
def test_one_launch_equals_the_reference(dtype, gap, shapes, zero):
    memory, entries = lay_out(random_masters(shapes), dtype, gap)
    expected, before = expected_planes(entries), memory.clone()
    table = MemberTable.build(entries, consumed=memory if zero else None)
    assert (len(table.launches), table.remainder, table.zeroes_in_launch) == (1, (), zero)
    ops.requantize(table)
    assert_written(entries, expected)
    assert_bytes_equal(memory, torch.zeros_like(memory) if zero else before, what="sources")


@DTYPES
def test_special_values_equal_the_reference(dtype):
    """NaN, infinities, zeros, subnormals, extremes, and neighbours of powers of two as an amax."""
    largest = torch.finfo(torch.bfloat16).max
    specials = (0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 2.0**-133, -(2.0**-126))
    master = with_specials(wide_range_weights(2, 128, 384), specials=(*specials, largest))
    powers = torch.exp2(torch.arange(-133, 128).double())
    amaxes = torch.cat([powers, powers * (1 + 2**-7), powers * 1.75, powers * (2 - 2**-7)])
    amaxes = amaxes.clamp(max=largest).float()
    ladder = wide_range_weights(1, 32 * 33, 32, exponents=(-2, 0)).clamp(-1, 1)
    ladder[0, : amaxes.numel(), 7] = 1.0
    ladder[0, : amaxes.numel()] *= amaxes[:, None]
    lone = torch.stack([torch.full((32, 32), value) for value in (*specials, largest)])
    entries = lay_out([master, ladder, ladder.transpose(1, 2), lone], dtype)[1]
    expected = expected_planes(entries)
    ops.requantize(MemberTable.build(entries))
    assert_written(entries, expected)


def test_every_bf16_value_equals_the_reference():
    """Each of the 65,536 bit patterns, among its neighbours and as the amax of its block."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    blocks = torch.zeros(1, 1 << 16, 32, dtype=torch.bfloat16)
    blocks[0, :, 5] = values
    entries = lay_out([values.view(1, 256, 256), blocks], torch.bfloat16)[1]
    expected = expected_planes(entries)
    ops.requantize(MemberTable.build(entries))
    assert_written(entries, expected)


def test_fp32_ties_round_to_bf16_before_anything_else():
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (1, 256, 512), generator=generator)
    ties = (bits & ~0xFFFF | 0x8000).to(torch.int32).view(torch.float32)
    entries = lay_out([ties, bits.to(torch.int32).view(torch.float32)], torch.float32)[1]
    expected = expected_planes(entries)
    ops.requantize(MemberTable.build(entries))
    assert_written(entries, expected)


@pytest.mark.parametrize("padding", [24, 32], ids=["odd", "aligned"])
def test_padded_storage_keeps_its_padding(padding):
    shape = (2, 64, 160)

    def padded(size):
        experts, rows, cols = size
        memory = torch.full((experts, rows + 3, cols + padding), SENTINEL, dtype=torch.uint8)
        memory = memory.cuda()
        return memory, memory[:, :rows, :cols]

    directions = ("rowwise", "columnwise")
    sizes = {f"{d}_data": MXFP8.data_shape(shape, d) for d in directions}
    sizes |= {f"{d}_scale": MXFP8.scale_shape(shape, d) for d in directions}
    storage = {name: padded(size) for name, size in sizes.items()}
    planes = {name: view for name, (_, view) in storage.items()}
    target = QuantizedWeight(format=MXFP8, shape=shape, **planes)
    source = wide_range_weights(*shape).cuda()
    entry = TableEntry(parameter="fc1", source=source, target=target)
    ops.requantize(MemberTable.build([entry]))
    assert_written([entry], expected_planes([entry]))
    for memory, view in storage.values():
        view.fill_(SENTINEL)
        assert (memory == SENTINEL).all()


def test_other_formats_and_dtypes_share_a_table():
    """The reference reads its part of the consumed memory before the launch zeroes it."""
    memory, entries = lay_out(random_masters(MIXED), torch.bfloat16)
    entries[1:3] = [
        TableEntry(parameter=f"other{index}", source=entry.source, target=target)
        for index, (entry, target) in enumerate(
            (entry, poisoned(format, tuple(entry.source.shape)))
            for entry, format in zip(entries[1:3], (NVFP4, FP8_BLOCK), strict=True)
        )
    ]
    expected = expected_planes(entries)
    table = MemberTable.build(entries, consumed=memory)
    assert (len(table.launches), len(table.remainder), table.zeroes_in_launch) == (1, 2, True)
    ops.requantize(table)
    assert_written(entries, expected)
    assert not memory.any()

    entries = lay_out(random_masters(WHOLE_TILES), torch.float32)[1] + entries
    memory.copy_(wide_range_weights(memory.numel()))
    expected = expected_planes(entries)
    table = MemberTable.build(entries, consumed=memory)
    assert (len(table.launches), table.zeroes_in_launch) == (2, False)
    ops.requantize(table)
    assert_written(entries, expected)
    assert not memory.any()


def test_the_reference_can_be_asked_for():
    memory, entries = lay_out(random_masters(MIXED), torch.bfloat16)
    expected = expected_planes(entries)
    ops.requantize(MemberTable.build(entries, consumed=memory), "reference")
    assert_written(entries, expected)
    assert not memory.any()


def test_sources_that_moved_are_read_where_they_are_now():
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
    expected = expected_planes(entries)
    ops.requantize(table)
    assert_written(entries, expected)
    assert not memory.any()
    assert in_the_way.all()


def test_a_captured_graph_requantizes_new_values():
    memory, entries = lay_out(random_masters(MIXED), torch.bfloat16)
    table = MemberTable.build(entries, consumed=memory)
    ops.requantize(table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.requantize(table)
    for seed in range(2):
        memory.copy_(wide_range_weights(memory.numel(), seed=seed))
        expected = expected_planes(entries)
        graph.replay()
        assert_written(entries, expected)
        assert not memory.any()


def test_a_launch_allocates_nothing_and_does_not_wait():
    memory, entries = lay_out(random_masters(MIXED), torch.bfloat16)
    table = MemberTable.build(entries, consumed=memory)
    ops.requantize(table)
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.requantize(table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for key in ("allocation.all.allocated", "segment.all.allocated"):
        assert after[key] == before[key]


def test_a_weight_of_more_than_2_31_elements():
    """Its ends are compared: tiles on both sides of the 31-bit boundary, and the last rows."""
    free, _ = torch.cuda.mem_get_info()
    if free < 16e9:
        pytest.skip(f"needs 16 GB of GPU memory, found {free / 1e9:.0f} GB")
    rows, cols = (1 << 31) // 4096 + 64, 4096
    memory = torch.ones(rows * cols + 8192, dtype=torch.bfloat16, device="cuda")
    source = memory[: rows * cols].view(1, rows, cols)
    parts = [slice(0, 32), slice(rows - 128, rows)]
    for seed, part in enumerate(parts):
        source[:, part] = wide_range_weights(*source[:, part].shape, seed=seed).cuda()
    expected = [reference.quantize(source[:, part], MXFP8) for part in parts]
    target = poisoned(MXFP8, tuple(source.shape))
    entry = TableEntry(parameter="fc1", source=source, target=target)
    ops.requantize(MemberTable.build([entry], consumed=memory))
    for part, want in zip(parts, expected, strict=True):
        blocks = slice(part.start // 32, part.stop // 32)
        assert_bytes_equal(target.rowwise_data[:, part], want.rowwise_data)
        assert_bytes_equal(target.rowwise_scale[:, part], want.rowwise_scale)
        assert_bytes_equal(target.columnwise_data[:, part], want.columnwise_data)
        assert_bytes_equal(target.columnwise_scale[:, blocks], want.columnwise_scale)
    middle = target.rowwise_scale[:, 32:-128]
    assert (middle == middle[0, 0, 0]).all()
    assert not memory.view(torch.int64).any()
