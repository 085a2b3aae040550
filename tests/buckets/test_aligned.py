"""Buckets end where shards become whole, wherever that is cheap; parameters stay in place."""

from math import lcm, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.buckets.layout import (
    MOST_GROWTH,
    aligned_end,
    cuts_block_rows,
    plan_buffers,
    side_by_side,
)
from moe_optim.formats import FORMATS, FP8_BLOCK, MXFP8
from tests.support.formats import REPRESENTATIVE_FORMATS

MODELS = {  # experts of a bucket: [2F, H] and [H, F]
    "qwen3-30b-a3b": ((16, 2048, 768), (16, 1536, 2048)),
    "deepseek-v3": ((8, 7168, 2048), (8, 4096, 7168)),
    "one narrow expert": ((1, 256, 128), (1, 256, 256)),
}
BUSBW = 1 << 16
SIZES = (*range(2, 33), 48, 63, 64, 72, 96, 127, 128, 144)
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def divisor(dp_size, busbw):
    """Return what Megatron pads the end of a bucket to."""
    return lcm(dp_size, 128, BUSBW) if busbw else lcm(dp_size, 128)


def stock_end(slots, dp_size, busbw):
    multiple = divisor(dp_size, busbw)
    return -(-slots[-1].end // multiple) * multiple


@EVERY_FORMAT
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("busbw", [False, True], ids=["", "busbw"])
def test_every_shard_of_every_buffer_has_whole_bytes_at_every_size(format, shapes, busbw):
    """At 2 to 144 ranks: Megatron's own rules hold, growth beyond them is 1% or a few bytes, and
    the plan of the wire exists."""
    slots = side_by_side(shapes)
    for dp_size in SIZES:
        stock = stock_end(slots, dp_size, busbw)
        end = aligned_end(format, slots, dp_size=dp_size, divisor=divisor(dp_size, busbw))
        assert end.numel >= stock >= slots[-1].end
        assert end.numel % divisor(dp_size, busbw) == 0
        least = divisor(dp_size, busbw) * format.elements_per_byte
        assert end.numel - stock <= max(MOST_GROWTH * slots[-1].end, least)
        shard = end.numel // dp_size
        assert (shard * format.data_bytes_per_element) % 1 == 0
        buffers = plan_buffers(format, slots, end.numel, dp_size)
        for buffer in buffers:
            if buffer.is_sliced:
                assert buffer.nbytes % dp_size == 0
            else:
                assert buffer.name == "global_amax" or end.unit == "byte" or format is FP8_BLOCK


@pytest.mark.parametrize("format", REPRESENTATIVE_FORMATS.values(), ids=REPRESENTATIVE_FORMATS)
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
def test_where_shards_are_whole_block_rows_no_block_lies_on_two_ranks(format, shapes):
    """The unit ``block_row``, checked at the corners of every block around a cut."""
    slots = side_by_side(shapes)
    seen = set()
    for dp_size in (1, *SIZES):
        end = aligned_end(format, slots, dp_size=dp_size, divisor=divisor(dp_size, busbw=False))
        seen.add(end.unit)
        if end.unit != "block_row":
            continue
        assert not cuts_block_rows(format, slots, end.numel // dp_size)
        for slot in slots:
            _, rows, cols = slot.shape
            for cut in slot.cuts(end.numel // dp_size):
                for direction in format.directions:
                    block = format.block(direction)
                    assert not lies_on_both_sides(cut % (rows * cols), rows, cols, block)
    assert "block_row" in seen


def lies_on_both_sides(position, rows, cols, block):
    """Return whether a block [height, width] of an expert has elements before and from a position.

    Elements are counted in row-major order, where the first of a block is its upper left corner and
    the last its lower right one.
    """
    height, width = block
    top = position // cols // height * height
    bottom = min(top + height, rows) - 1
    lefts = np.arange(0, cols, width)
    first = top * cols + lefts
    last = bottom * cols + np.minimum(lefts + width, cols) - 1
    return bool(((first < position) & (position <= last)).any())


def test_whole_block_rows_are_given_up_where_they_cost_more_than_one_percent():
    """8 experts of DeepSeek-V3: a block row of both widths is 2048 x 7168 / gcd elements."""
    slots = side_by_side(MODELS["deepseek-v3"])
    few = aligned_end(MXFP8, slots, dp_size=2, divisor=128)
    many = aligned_end(MXFP8, slots, dp_size=144, divisor=128)
    assert (few.unit, many.unit) == ("block_row", "scale")
    block_row = lcm(32 * 2048, 32 * 7168)
    assert 144 * block_row > MOST_GROWTH * slots[-1].end  # it could not have been cheap
    assert many.numel - stock_end(slots, 144, busbw=False) < 144 * 32 * 4


@EVERY_FORMAT
@given(data=st.data())
def test_buffers_of_different_parameters_never_overlap(format, data):
    """Every entry of a buffer belongs to at most one parameter, sliced or reduced."""
    multiple = format.dimension_multiple
    sizes = st.integers(1, 5).map(lambda n: n * multiple if multiple > 1 else 37 * n)
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 3), sizes, sizes), min_size=1, max_size=4))
    dp_size = data.draw(st.integers(1, 9))
    slots = side_by_side(shapes)
    end = aligned_end(format, slots, dp_size=dp_size, divisor=divisor(dp_size, busbw=False))
    wire = plan_buffers(format, slots, end.numel, dp_size)
    assert wire
    for buffer in wire:
        assert len(buffer.starts) > 0
        last = 0
        for start, shape in zip(buffer.starts, buffer.shapes, strict=True):
            assert start >= last
            last = start + prod(shape)
        assert last <= buffer.numel
