"""Plans of saves are validated as torch does, but not by comparing all chunks with all others."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_optim.checkpoint.owned_boxes import cut_into_boxes
from moe_optim.checkpoint.plan_validation import is_tiled, validate_quickly

RANKS = [None, None]  # torch looks at their number alone


def tensor_of(shape, boxes) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_holes_overlaps_and_chunks_outside_are_found_as_by_torch(shape, data):
    """Of ranges that ranks own, one of which is moved, grown, shrunk, doubled or left out."""
    numel = prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    ranges = zip(cuts, cuts[1:], strict=False)
    boxes = [box for start, end in ranges for box in cut_into_boxes(start, end, tuple(shape))]
    number = data.draw(st.integers(0, len(boxes) - 1))
    moves = st.lists(st.sampled_from((0, 0, 0, 1, -1)), min_size=len(shape), max_size=len(shape))
    at, size = boxes[number]
    moved = [low + by for low, by in zip(at, data.draw(moves), strict=True)]
    grown = [max(1, length + by) for length, by in zip(size, data.draw(moves), strict=True)]
    boxes[number : number + 1] = [(moved, grown)] * data.draw(st.sampled_from((1, 1, 1, 0, 2)))
    tensor = tensor_of(shape, boxes)
    assert is_tiled(tensor) == default_planner._validate_global_plan(RANKS, Metadata({"w": tensor}))


def test_chunks_that_share_their_longest_axis_are_not_all_compared():
    """Experts of 48 layers, cut in two: 12,288 chunks. torch needs 75 million comparisons."""
    boxes = [((layer, e, row, 0), (1, 1, 4, 16)) for layer in range(48) for e in range(128)
             for row in (0, 4)]  # fmt: skip
    tensor = tensor_of((48, 128, 8, 16), boxes)
    stock = default_planner._validate_global_plan
    with validate_quickly():
        assert default_planner._validate_global_plan(RANKS, Metadata({"w": tensor}))
        tensor.chunks[7] = tensor.chunks[8]
        assert not default_planner._validate_global_plan(RANKS, Metadata({"w": tensor}))
    assert default_planner._validate_global_plan is stock
