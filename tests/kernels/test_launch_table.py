"""Descriptors say where everything lies, and tables that no launch can serve are refused."""

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_optim.formats import (
    FORMATS,
    FP8_BLOCK,
    INT4,
    MXFP8,
    MXFP8_ROWS,
    NVFP4,
    NVFP4_ROWS,
    QuantizedWeight,
)
from moe_optim.kernels import launch_table
from moe_optim.kernels.exchange import AMAX_SLOTS, plan_exchange
from moe_optim.kernels.launch_table import LaunchTable, can_launch, find_gaps, own_slots
from moe_optim.kernels.member_table import MemberTable, TableEntry, plan_transposes
from moe_optim.kernels.tuning import (
    AMAX_TILE,
    GAP_TILE,
    ROW_TILE_ROWS,
    TILES,
    UPDATE_TILES,
    Tile,
)
from tests.support.inputs import poisoned
from tests.support.ptx.launches import plan_kernels


def stack(*shape, dtype=torch.bfloat16, format=MXFP8):
    source, target = torch.zeros(shape, dtype=dtype), QuantizedWeight.empty(format, shape)
    return TableEntry(parameter="fc", source=source, target=target)


def shard(shape, start, end, cuts, format=MXFP8):
    return TableEntry(
        parameter="fc",
        source=torch.zeros(end - start),
        target=QuantizedWeight.empty(format, shape),
        start=start,
        cuts=tuple(cuts),
    )


def build(entries, consumed=None):
    """Build one launch over all entries, with the slots that they need."""
    planned, slots = [], 0
    for entry in entries:
        shared = plan_exchange(entry.target.format, entry.target.shape, entry.cuts, first=slots)
        planned.append((entry, shared))
        slots += shared.size
    amax = torch.zeros(slots + own_slots(planned))
    gaps = consumed if consumed is None else find_gaps(consumed, [one.source for one in entries])
    return LaunchTable(planned, amax, first_free_slot=slots, gaps=gaps)


def test_every_expert_with_an_amax_has_slots_of_its_own():
    entries = [stack(2, 32, 32, format=NVFP4), stack(1, 16, 16, format=NVFP4)]
    table = build(entries)
    assert table.descriptors[:, 13].tolist() == [0, AMAX_SLOTS, 2 * AMAX_SLOTS]
    assert table.amax.numel() == 3 * AMAX_SLOTS
    addresses = [entries[0].target.global_amax[i].data_ptr() for i in (0, 1)]
    assert table.descriptors[:2, 14].tolist() == addresses


def test_a_cut_block_row_has_tiles_and_slots_of_its_own():
    """Rows 40 to 136 of three experts of 64: half a block row, an expert, a quarter block row.

    A block row of 128 columns has as many columnwise maxima, and as many of rows.
    """
    entry = shard((3, 64, 128), 40 * 128, 136 * 128, (40 * 128, 136 * 128))
    table = build([entry])
    assert table.tiles.tolist() == [[1, 0, 0, 0], [1, 32, 0, 0]]
    assert table.cut_tiles.tolist() == [[0, 32, 0, 0], [2, 0, 0, 256]]


@pytest.mark.parametrize(
    ("rows", "end", "masked"),
    [(64, 64 * 128, False), (72, 72 * 128, True), (64, 40 * 128, True), (64, 48 * 128, False)],
    ids=["whole", "no whole tiles", "an end in a tile", "an end between tiles"],
)
def test_tiles_of_row_only_formats_are_masked_where_a_member_ends_inside_of_one(rows, end, masked):
    entry = shard((1, rows, 128), 0, end, (end,) if end < rows * 128 else (), format=INT4)
    exchange = plan_exchange(INT4, entry.target.shape, entry.cuts)
    tile = Tile(cols=128, num_warps=4, rows=16)
    amax = torch.zeros(exchange.size)
    assert LaunchTable([(entry, exchange)], amax, tile=tile).masked is masked


def test_no_tile_of_a_row_only_format_is_higher_than_offsets_allow():
    tiles = [*TILES.items(), *UPDATE_TILES.items()]
    heights = [tile.rows for (name, _), tile in tiles if FORMATS[name].is_row_only]
    assert all(isinstance(height, int) and height <= ROW_TILE_ROWS for height in heights)


@pytest.mark.parametrize(
    ("stride", "fits"), [((1 << 31) // 64 - 1, True), ((1 << 31) // 64, False)]
)
def test_rows_that_lie_too_far_apart_for_a_tile_are_left_to_the_reference(stride, fits):
    entry = stack(1, 1, 32, format=MXFP8_ROWS)
    data = entry.target.rowwise_data.as_strided((1, 1, 32), (stride, stride, 1))
    target = replace(entry.target, rowwise_data=data, columnwise_data=data)
    assert can_launch(replace(entry, target=target)) is fits


def test_the_source_of_an_expert_begins_where_its_first_element_would_lie():
    entry = shard((2, 64, 32), 1024, 3072, (1024, 3072))
    table = build([entry])
    base = entry.source.data_ptr()
    assert table.descriptors[:, 0].tolist() == [base - 4 * 1024, base + 4 * 1024]
    assert table.descriptors[:, 11:13].tolist() == [[1024, 2048], [0, 1024]]
    assert table.tiles[:, :3].tolist() == [[0, 32, 0], [1, 0, 0]]


def test_gaps_follow_the_members():
    memory = torch.zeros(10_000 + 2048, dtype=torch.bfloat16)
    source = memory[:1024].view(1, 32, 32)
    entry = replace(stack(1, 32, 32), source=source)
    table = build([entry], consumed=memory)
    count = memory.numel() - 1024
    assert table.descriptors[1, :2].tolist() == [memory[1024:].data_ptr(), count]
    assert table.tiles[1:].tolist() == [[1, 0, start, 0] for start in range(0, count, GAP_TILE)]
    assert (table.num_tiles, len(table.tiles), table.zeroes) == (1, 4, True)


def test_a_gap_larger_than_a_descriptor_has_several_that_meet(monkeypatch):
    monkeypatch.setattr(launch_table, "_MAX_GAP", 1000)
    memory = torch.zeros(1024 + 2500, dtype=torch.bfloat16)
    entry = replace(stack(1, 32, 32), source=memory[:1024].view(1, 32, 32))
    rows = build([entry], consumed=memory).descriptors[1:, :2].tolist()
    start = memory[1024:].data_ptr()
    assert rows == [[start, 1000], [start + 2000, 1000], [start + 4000, 500]]


def test_the_last_block_row_of_an_expert_is_whole_though_it_is_lower():
    """Of one that is owned to its end; of a part that ends earlier, it is left to a cut."""
    whole = shard((2, 130, 40), 0, 2 * 130 * 40, (), format=FP8_BLOCK)
    assert [(one.first_whole, one.end_whole) for one in whole.owned_parts()] == [(0, 130 * 40)] * 2
    end = 129 * 40
    part = shard((2, 130, 40), 0, end, (end,), format=FP8_BLOCK)
    assert [(one.first_whole, one.end_whole) for one in part.owned_parts()] == [(0, 128 * 40)]


@pytest.mark.parametrize("cols", [64, 4096, 4112])
def test_parts_in_which_an_amax_is_found_reach_the_last_element(cols):
    """As many as the slots of an expert at most, each a whole number of tiles but for the last."""
    table = build([stack(1, 64, cols, format=NVFP4), stack(1, 16, 16, format=NVFP4)])
    numel, most = 64 * cols, AMAX_SLOTS * AMAX_TILE
    length = AMAX_TILE if numel <= most else 2 * AMAX_TILE
    numbers = list(range(0, numel, length))
    assert len(numbers) <= AMAX_SLOTS
    assert table.amax_parts.tolist() == [*([0, number // length] for number in numbers), [1, 0]]


@pytest.mark.parametrize(
    ("experts", "padding", "aligned"), [(2, 16, True), (2, 4, False), (1, 4, True)]
)
def test_of_several_experts_each_has_to_begin_at_such_a_multiple(experts, padding, aligned):
    entry = stack(experts, 32, 32)
    memory = torch.zeros(experts, 1024 + padding, dtype=torch.uint8)
    data = memory[:, :1024].unflatten(1, (32, 32))
    target = replace(entry.target, rowwise_data=data)
    assert build([replace(entry, target=target)]).aligned is aligned


@pytest.mark.parametrize(("stride", "fits"), [((1 << 26) - 16, True), (1 << 26, False)])
def test_the_rows_of_a_tile_lie_within_31_bits(stride, fits):
    """Those of a block row of 32, here; further apart they are left to the reference."""
    target = QuantizedWeight.empty(MXFP8, (1, 32, 32), device="meta")
    data = target.rowwise_data.as_strided((1, 32, 32), (1, stride, 1))
    source = torch.empty(1, 32, 32, device="meta")
    entry = TableEntry(parameter="fc", source=source, target=replace(target, rowwise_data=data))
    assert can_launch(entry) is fits


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


def test_consumed_memory_is_not_zeroed_between_the_passes_of_a_cut_block_row(with_kernels):
    entry = shard((1, 64, 32), 0, 1000, (1000,))
    assert not MemberTable.build([entry], consumed=entry.source).zeroes_in_launch


def test_memory_that_was_freed_is_noticed(with_kernels):
    entry = stack(2, 32, 32)
    first = replace(entry, source=entry.source[:1], target=poisoned(MXFP8, (1, 32, 32)))
    table = MemberTable.build([first, entry])
    assert len(table.places.tensors) == 1
    assert not table.has_moved
    entry.source.untyped_storage().resize_(0)
    assert table.has_moved


def test_memory_that_was_exchanged_is_noticed_and_not_kept(with_kernels):
    """As when an optimizer is offloaded by hand: what a master leaves is free."""
    entry = stack(2, 32, 32, dtype=torch.float32)
    left = StorageWeakRef(entry.source.untyped_storage())
    table = MemberTable.build([entry])
    entry.source.data = torch.ones(2, 32, 32)
    assert table.has_moved
    assert left.expired()


# Several launches of a table


@pytest.fixture
def with_kernels(monkeypatch):
    """Tables are built as on a GPU."""
    plan_kernels(monkeypatch)


def test_launches_of_a_table_have_amax_slots_of_their_own(with_kernels):
    """And none that other ranks fill, too."""
    cut = shard((2, 32, 32), 0, 1024 + 64, (1024 + 64,), format=NVFP4)
    narrow = stack(3, 32, 32, format=NVFP4)
    table = MemberTable.build([cut, narrow])
    shared = table.exchange.numel()
    slots = sorted(slot for launch in table.launches for slot in launch.amax_slots)
    assert (len(table.launches), len(slots)) == (2, 5)
    assert [slot for slot in slots if slot < shared] == [table.exchanges[0].experts[1]]
    ends = [*slots[1:], table.launches[0].amax.numel()]
    assert all(end - slot >= AMAX_SLOTS for slot, end in zip(slots, ends, strict=True))


@pytest.mark.parametrize(
    ("formats", "zeroes"), [((MXFP8, MXFP8), True), ((MXFP8, NVFP4), False)], ids=["one", "two"]
)
def test_only_the_one_launch_of_a_table_zeroes_what_it_reads(formats, zeroes, with_kernels):
    """Of several, the first would zero what the next has still to read."""
    memory = torch.zeros(2, 1, 32, 32, dtype=torch.bfloat16)
    entries = [
        replace(stack(1, 32, 32, format=format), source=source)
        for format, source in zip(formats, memory, strict=True)
    ]
    assert MemberTable.build(entries, consumed=memory).zeroes_in_launch is zeroes


# After a gather


@pytest.mark.parametrize("format", [INT4, MXFP8_ROWS, NVFP4_ROWS], ids=lambda format: format.name)
def test_nothing_follows_a_gather_of_row_only_formats(format, with_kernels):
    table = MemberTable.build([stack(2, 33, 64, format=format)])
    assert table.kernels and not table.finish.calls


@pytest.mark.parametrize(("stride", "pack"), [(8, 4), (12, 4), (9, 1), (10, 1)])
def test_bytes_move_as_words_where_every_row_begins_at_one(stride, pack):
    source = torch.zeros(8, stride, dtype=torch.uint8)[:, :8]
    copy = torch.zeros(8, 8, dtype=torch.uint8)
    for pair in ((source, copy), (copy, source)):
        (kernel,) = plan_transposes([pair]).kernels
        assert kernel.constants["PACK"] == pack
