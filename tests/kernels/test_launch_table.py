"""Descriptors say where everything lies, and tables that no launch can serve are refused."""

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import MXFP8, MXFP8_2D, NVFP4, QuantizedWeight
from moe_optim.kernels.launch_table import GAP_TILE, LaunchTable, can_launch, find_gaps
from moe_optim.kernels.member_table import MemberTable, TableEntry
from tests.support.inputs import poisoned


def stack(*shape, dtype=torch.bfloat16, format=MXFP8):
    return torch.zeros(shape, dtype=dtype), QuantizedWeight.empty(format, shape)


def test_a_descriptor_holds_the_addresses_and_strides_of_one_expert():
    source, target = stack(3, 64, 96)
    table = LaunchTable.build([stack(2, 32, 32), (source, target)])
    assert table.descriptors.shape == (5, 11)
    assert table.descriptors[4].tolist() == [
        source[2].data_ptr(),
        target.rowwise_data[2].data_ptr(),
        target.rowwise_scale[2].data_ptr(),
        target.columnwise_data[2].data_ptr(),
        target.columnwise_scale[2].data_ptr(),
        *(64, 96, 96, 3, 96, 96),
    ]


def test_tiles_cover_every_member_once_and_in_order():
    members = [stack(2, 64, 320), stack(1, 32, 128)]
    table = LaunchTable.build(members)
    assert table.tile.cols == 128
    first = [[expert, row, col] for expert in (0, 1) for row in (0, 32) for col in (0, 128, 256)]
    assert table.tiles.tolist() == [*first, [2, 0, 0]]
    assert table.num_tiles == table.num_programs == 13
    assert table.masked
    assert not LaunchTable.build(members[1:]).masked


def test_gaps_follow_the_members():
    memory = torch.zeros(10_000 + 2048, dtype=torch.bfloat16)
    source = memory[:1024].view(1, 32, 32)
    target = QuantizedWeight.empty(MXFP8, source.shape)
    table = LaunchTable.build([(source, target)], consumed=memory)
    count = memory.numel() - 1024
    assert table.descriptors[1, :2].tolist() == [memory[1024:].data_ptr(), count]
    assert table.tiles[1:].tolist() == [[1, 0, start] for start in range(0, count, GAP_TILE)]
    assert (table.num_tiles, table.num_programs, table.zeroes) == (1, 4, True)


def test_only_memory_at_multiples_of_sixteen_bytes_counts_as_aligned():
    memory = torch.zeros(1024 + 8, dtype=torch.bfloat16)
    target = QuantizedWeight.empty(MXFP8, (1, 32, 32))
    for start, aligned in ((0, True), (8, True), (4, False), (1, False)):
        source = memory[start : start + 1024].view(1, 32, 32)
        assert LaunchTable.build([(source, target)]).aligned is aligned


MEMORY = torch.zeros(100, dtype=torch.bfloat16)
SOURCES = {  # sources -> element ranges of the gaps in MEMORY
    "none": ([], [(0, 100)]),
    "everything": ([MEMORY], []),
    "both ends": ([MEMORY[10:90]], [(0, 10), (90, 100)]),
    "any order": ([MEMORY[50:], MEMORY[:40]], [(40, 50)]),
    "touching": ([MEMORY[:40], MEMORY[40:60]], [(60, 100)]),
    "overlapping": ([MEMORY[:40], MEMORY[39:60]], None),
    "outside": ([MEMORY[:40], torch.zeros(4)], None),
}


@pytest.mark.parametrize(("sources", "expected"), SOURCES.values(), ids=SOURCES.keys())
def test_gaps_are_what_no_source_covers(sources, expected):
    start = MEMORY.data_ptr()
    addresses = expected and [(start + 2 * first, start + 2 * last) for first, last in expected]
    assert find_gaps(MEMORY, sources) == (addresses if expected else expected)


def test_strided_or_odd_memory_has_no_gaps_to_list():
    assert find_gaps(MEMORY[::2], []) is None
    assert find_gaps(torch.zeros(3, dtype=torch.uint8), []) is None


REFUSED = {
    "another format": [stack(1, 32, 32, format=MXFP8_2D)],
    "packed elements": [stack(1, 32, 32, format=NVFP4)],
    "no expert": [stack(0, 32, 32)],
    "two dtypes": [stack(1, 32, 32), stack(1, 32, 32, dtype=torch.float32)],
    "nothing": [],
}


@pytest.mark.parametrize("members", REFUSED.values(), ids=REFUSED.keys())
def test_what_no_launch_can_serve_is_refused(members):
    with pytest.raises(LayoutError, match="launch table: expected MXFP8 weights"):
        LaunchTable.build(members)


def test_transposed_planes_are_left_to_the_reference():
    source, target = stack(1, 32, 32)
    assert can_launch(source, target)
    transposed = QuantizedWeight(
        format=MXFP8,
        shape=target.shape,
        rowwise_data=target.rowwise_data.transpose(1, 2),
        rowwise_scale=target.rowwise_scale,
        columnwise_data=target.columnwise_data,
        columnwise_scale=target.columnwise_scale,
    )
    assert not can_launch(source, transposed)


def test_consumed_memory_must_hold_the_sources():
    with pytest.raises(LayoutError, match="launch table: expected consumed memory"):
        LaunchTable.build([stack(1, 32, 32)], consumed=torch.zeros(8))


def test_without_a_gpu_everything_is_left_to_the_reference():
    source, target = stack(1, 32, 32)
    entry = TableEntry(parameter="fc1", source=source, target=target)
    table = MemberTable.build([entry], consumed=source)
    assert table.launches == ()
    assert table.remainder == (entry,)
    assert not table.zeroes_in_launch


def test_memory_that_was_freed_is_noticed():
    source, target = stack(2, 32, 32)
    table = LaunchTable.build([(source[:1], poisoned(MXFP8, (1, 32, 32))), (source, target)])
    assert len(table.source_memory) == 1
    assert not table.has_moved
    source.untyped_storage().resize_(0)
    assert table.has_moved
