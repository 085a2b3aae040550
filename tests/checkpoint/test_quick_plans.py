"""Saves and reads are planned as torch plans them, but not by comparing all chunks with all."""

from math import prod
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner, planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_optim.checkpoint import staging
from moe_optim.checkpoint.owned_boxes import cut_into_boxes
from moe_optim.checkpoint.staging import is_tiled, plan_quickly

RANKS = [None, None]  # torch looks at their number alone


def chunk(at: Any, size: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(at), torch.Size(size))


def tensor_of(shape: Any, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)


def boxes_of(shape: list[int], cuts: list[int]) -> list[tuple[Any, Any]]:
    """Return the boxes of ranges that ranks own."""
    bounds = sorted({0, prod(shape), *cuts})
    ranges = zip(bounds, bounds[1:], strict=False)
    return [box for low, high in ranges for box in cut_into_boxes(low, high, tuple(shape))]


def validate(tensor: TensorStorageMetadata) -> bool:
    return default_planner._validate_global_plan(RANKS, Metadata({"w": tensor}))


def plan(stored: TensorStorageMetadata, wanted: list[ChunkStorageMetadata]) -> list[Any]:
    return planner_helpers.create_read_items_for_chunk_list("w", stored, wanted)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_holes_overlaps_and_chunks_outside_are_found_as_by_torch(shape, data):
    """Of ranges that ranks own, one of which is moved, grown, shrunk, doubled or left out."""
    numel = prod(shape)
    boxes = boxes_of(shape, data.draw(st.lists(st.integers(0, numel), max_size=4)))
    number = data.draw(st.integers(0, len(boxes) - 1))
    moves = st.lists(st.sampled_from((0, 0, 0, 1, -1)), min_size=len(shape), max_size=len(shape))
    at, size = boxes[number]
    moved = [low + by for low, by in zip(at, data.draw(moves), strict=True)]
    grown = [max(1, length + by) for length, by in zip(size, data.draw(moves), strict=True)]
    boxes[number : number + 1] = [(moved, grown)] * data.draw(st.sampled_from((1, 1, 1, 0, 2)))
    tensor = tensor_of(shape, [chunk(*box) for box in boxes])
    assert is_tiled(tensor) == validate(tensor)


@given(*[st.lists(st.integers(0, 60), max_size=6)] * 2, st.data())
def test_every_wanted_element_is_read_from_where_torch_reads_it(saved, loaded, data):
    """Stored as the ranges of some ranks, wanted as some of those of others."""
    shape = [3, 4, 5]
    stored = tensor_of(shape, [chunk(*box) for box in boxes_of(shape, saved)])
    all_wanted = [chunk(*box) for box in boxes_of(shape, loaded)]
    wanted = data.draw(st.lists(st.sampled_from(all_wanted), unique_by=id))
    want = plan(stored, wanted)
    with mock.patch.object(staging, "_FEW_STORED", 0), plan_quickly():
        got = plan(stored, wanted)
    assert sorted(map(repr, got)) == sorted(map(repr, want))


def test_chunks_that_share_their_longest_axis_are_not_all_compared():
    """Experts of 48 layers. torch compares 19 million pairs to save them, and 786,432 to read one
    layer."""
    chunks = [
        chunk((layer, expert, 0, 0), (1, 1, 8, 1024))
        for layer in range(48)
        for expert in range(128)
    ]
    stored = tensor_of((48, 128, 8, 1024), chunks)
    stock = planner_helpers.create_read_items_for_chunk_list
    compare = planner_helpers._check_shard_metadata_pair_overlap
    with (
        mock.patch.object(
            planner_helpers, "_check_shard_metadata_pair_overlap", side_effect=compare
        ) as compared,
        plan_quickly(),
    ):
        reads = plan(stored, chunks[128:256])
        assert validate(stored)
        stored.chunks[7] = stored.chunks[8]
        assert not validate(stored)
    assert [read.storage_index.index for read in reads] == list(range(128, 256))
    assert [read.dest_index.index for read in reads] == list(range(128))
    assert compared.call_count == 128
    assert planner_helpers.create_read_items_for_chunk_list is stock
