"""Vectors over ranks say what looking at every element says."""

from math import lcm

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.buckets.layout import Slot
from moe_optim.commands.plan.buckets import count_owned


@st.composite
def buckets(draw):
    """Return slots with gaps between them, the length of their bucket, and ranks."""
    slots, start, sizes = [], 0, st.integers(1, 150)
    shapes = st.lists(st.tuples(st.integers(1, 3), sizes, sizes), min_size=1, max_size=4)
    for index, shape in enumerate(draw(shapes)):
        start += draw(st.integers(0, 3)) * 64
        slots.append(Slot(name=f"weight{index}", start=start, shape=shape))
        start = slots[-1].end
    dp_size = draw(st.integers(1, 12))
    divisor = lcm(dp_size, draw(st.sampled_from([1, 128, 1024])))
    return draw(st.permutations(slots)), -(-start // divisor) * divisor, dp_size


@settings(max_examples=60)
@given(buckets())
def test_owned_elements_are_those_found_by_looking_at_every_one(bucket):
    """Megatron lays parameters in reverse: slots come in any order."""
    slots, numel, dp_size = bucket
    is_held = torch.zeros(numel, dtype=torch.int64)
    for slot in slots:
        is_held[slot.start : slot.end] = 1
    owned = is_held.view(dp_size, -1).sum(1).tolist()
    assert count_owned(slots, numel, dp_size).tolist() == owned
