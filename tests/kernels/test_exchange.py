"""Ranks agree on the maxima they share from shapes and cuts alone."""

import pytest

from moe_optim.errors import LayoutError
from moe_optim.formats import FORMATS, FP8_BLOCK, INT4, MXFP8, MXFP8_2D, NVFP4, NVFP4_ROWS
from moe_optim.kernels.exchange import AMAX_SLOTS, plan_exchange

SHAPE = (2, 64, 128)
NUMEL = 64 * 128

SHARED = {  # format, cuts -> block rows, experts, slots
    "nothing is cut": (MXFP8, (), {}, {}, 0),
    "at a block row": (MXFP8, (32 * 128,), {}, {}, 0),
    "at an expert": (NVFP4, (NUMEL,), {}, {}, 0),
    "inside of a row": (MXFP8, (5,), {(0, 0): 0}, {}, 256),
    "at a row": (MXFP8_2D, (NUMEL + 33 * 128,), {(1, 32): 0}, {}, 4),
    "twice in a block row": (MXFP8_2D, (9, 8), {(0, 0): 0}, {}, 4),
    "in two block rows": (MXFP8_2D, (9, NUMEL + 9), {(0, 0): 0, (1, 0): 4}, {}, 8),
    "an expert at a block row": (NVFP4, (16 * 128,), {}, {0: 0}, AMAX_SLOTS),
    "an expert in a block row": (NVFP4, (NUMEL + 10,), {(1, 0): 0}, {1: 8}, 8 + AMAX_SLOTS),
    "a block row lower than its blocks": (FP8_BLOCK, (NUMEL + 10,), {(1, 0): 0}, {}, 1),
    "at a row that is a block row": (INT4, (3 * 128,), {}, {}, 0),
    "inside of rows that are block rows": (INT4, (10, 140), {(0, 0): 0, (0, 1): 4}, {}, 8),
    "an expert in a row": (NVFP4_ROWS, (140,), {(0, 1): 0}, {0: 8}, 8 + AMAX_SLOTS),
}


@pytest.mark.parametrize(
    ("format", "cuts", "block_rows", "experts", "size"), SHARED.values(), ids=SHARED.keys()
)
def test_block_rows_and_experts_that_a_cut_runs_through_are_shared(
    format, cuts, block_rows, experts, size
):
    exchange = plan_exchange(format, SHAPE, cuts)
    assert (exchange.block_rows, exchange.experts, exchange.size) == (block_rows, experts, size)


def test_slots_follow_those_of_other_weights():
    exchange = plan_exchange(MXFP8_2D, SHAPE, (9,), first=100)
    assert (exchange.block_rows, exchange.first, exchange.size) == ({(0, 0): 100}, 100, 4)


def test_experts_that_go_on_in_weights_of_others_share_their_amax_once():
    """Whole or cut; formats without an amax an expert share nothing for it."""
    exchange = plan_exchange(NVFP4, SHAPE, (NUMEL + 10,), first=8, shares_experts=True)
    assert exchange.experts == {0: 8, 1: 8 + AMAX_SLOTS}
    assert exchange.block_rows == {(1, 0): 8 + 2 * AMAX_SLOTS}
    assert exchange.size == 2 * AMAX_SLOTS + 8
    assert not plan_exchange(MXFP8, SHAPE, (), shares_experts=True).size


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_the_order_of_the_cuts_does_not_matter(format):
    cuts = (NUMEL + 100, 50, 5000)
    assert plan_exchange(format, SHAPE, cuts) == plan_exchange(format, SHAPE, sorted(cuts))


@pytest.mark.parametrize("cut", [0, -2, 2 * NUMEL, 3])
def test_cuts_lie_inside_and_between_bytes(cut):
    with pytest.raises(LayoutError, match=rf"fc1: expected cuts inside of .* got {cut}\."):
        plan_exchange(NVFP4, SHAPE, (cut,), name="fc1")
