"""Reads are planned as torch plans them, but not by comparing all chunks with all others."""

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_optim.checkpoint import read_planning
from moe_optim.checkpoint.owned_boxes import cut_into_boxes

SHAPE = (3, 4, 5)
NUMEL = 60


def _chunks(cuts: list[int]) -> list[ChunkStorageMetadata]:
    bounds = sorted({0, NUMEL, *cuts})
    ranges = zip(bounds, bounds[1:], strict=False)
    return [
        ChunkStorageMetadata(torch.Size(at), torch.Size(size))
        for start, end in ranges
        for at, size in cut_into_boxes(start, end, SHAPE, by_matrix=True)
    ]


def _stored(chunks: list[ChunkStorageMetadata], shape: tuple[int, ...]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)


def _plan(stored: TensorStorageMetadata, wanted: list[ChunkStorageMetadata]) -> list[object]:
    return planner_helpers.create_read_items_for_chunk_list("w", stored, wanted)


@given(
    st.lists(st.integers(0, NUMEL), max_size=6),
    st.lists(st.integers(0, NUMEL), max_size=6),
    st.data(),
)
def test_every_wanted_element_is_read_from_where_torch_reads_it(saved, loaded, data):
    """Stored as the ranges of some ranks, wanted as some of those of others."""
    stored, all_wanted = _stored(_chunks(saved), SHAPE), _chunks(loaded)
    wanted = data.draw(st.lists(st.sampled_from(all_wanted), unique_by=id))
    want = _plan(stored, wanted)
    with mock.patch.object(read_planning, "_FEW", 0), read_planning.plan_quickly():
        got = _plan(stored, wanted)
    assert sorted(map(repr, got)) == sorted(map(repr, want))


def test_chunks_that_share_their_longest_axis_are_not_all_compared():
    """Experts of 48 layers, of which a rank wants one layer: torch compares 786,432 pairs."""
    boxes = [
        ChunkStorageMetadata(torch.Size((layer, expert, 0, 0)), torch.Size((1, 1, 8, 1024)))
        for layer in range(48)
        for expert in range(128)
    ]
    stored = _stored(boxes, (48, 128, 8, 1024))
    compare = planner_helpers._check_shard_metadata_pair_overlap
    before = planner_helpers.create_read_items_for_chunk_list
    with (
        mock.patch.object(
            planner_helpers, "_check_shard_metadata_pair_overlap", side_effect=compare
        ) as compared,
        read_planning.plan_quickly(),
    ):
        reads = _plan(stored, boxes[128:256])
    assert [read.storage_index.index for read in reads] == list(range(128, 256))
    assert [read.dest_index.index for read in reads] == list(range(128))
    assert compared.call_count == 128
    assert planner_helpers.create_read_items_for_chunk_list is before
