"""Vectors over ranks say what looking at every element says."""

from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.buckets.layout import Slot
from moe_optim.commands.plan.buckets import count_block_rows, count_owned
from moe_optim.formats import FORMATS
from tests.support.formats import REPRESENTATIVE_FORMATS

EVERY_FORMAT = pytest.mark.parametrize(
    "format", REPRESENTATIVE_FORMATS.values(), ids=REPRESENTATIVE_FORMATS
)


@st.composite
def buckets(draw, format):
    """Return slots with gaps between them, the length of their bucket, and ranks."""
    multiple = format.dimension_multiple
    sizes = st.integers(1, 3).map(lambda n: n * multiple) if multiple > 1 else st.integers(1, 150)
    rows = st.integers(1, 150) if format.is_row_only else sizes
    slots, start = [], 0
    for index, shape in enumerate(
        draw(st.lists(st.tuples(st.integers(1, 3), rows, sizes), min_size=1, max_size=4))
    ):
        start += draw(st.integers(0, 3)) * 64
        slots.append(Slot(name=f"weight{index}", start=start, shape=shape))
        start = slots[-1].end
    dp_size = draw(st.integers(1, 12))
    divisor = lcm(dp_size, draw(st.sampled_from([1, 128, 1024])))
    return slots, -(-start // divisor) * divisor, dp_size


@settings(max_examples=30)
@given(data=st.data())
@EVERY_FORMAT
def test_counts_are_those_found_by_looking_at_every_element(format, data):
    """Of owned elements, and of block rows that lie in a shard whole or in part."""
    slots, numel, dp_size = data.draw(buckets(format))
    block_row_of = torch.full((numel,), -1)
    count = 0
    for slot in slots:
        experts, rows, cols = slot.shape
        of_expert = torch.arange(rows) // format.block_row_height
        per_expert = int(of_expert[-1]) + 1
        firsts = torch.arange(experts).repeat_interleave(rows) * per_expert
        numbers = of_expert.repeat(experts) + firsts
        block_row_of[slot.start : slot.end] = count + numbers.repeat_interleave(cols)
        count += experts * per_expert
    sizes = torch.bincount(block_row_of[block_row_of >= 0], minlength=count)
    owned, whole, has_cut = [], [], []
    for shard in block_row_of.view(dp_size, -1):
        held = torch.bincount(shard[shard >= 0], minlength=count)
        owned.append(int(held.sum()))
        whole.append(int((held == sizes).sum()))
        has_cut.append(bool(((held > 0) & (held < sizes)).any()))
    assert count_owned(slots, numel, dp_size).tolist() == owned
    found = count_block_rows(format, slots, numel, dp_size)
    assert [one.tolist() for one in found] == [whole, has_cut]


def test_slots_may_come_in_any_order():
    """Megatron lays parameters in reverse; a bucket keeps either order."""
    slots = [Slot(name=str(i), start=4096 * i, shape=(1, 32, 128)) for i in range(3)]
    assert count_owned(slots[::-1], 12288, 2).tolist() == [6144, 6144]
    assert count_block_rows(FORMATS["mxfp8"], slots[::-1], 12288, 2)[0].tolist() == [1, 1]
