"""Shard plans: every element has one owner, and cut blocks are those that two owners share."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import DIRECTIONS, get_format
from moe_optim.layout import Member, ShardPlan, plan_shards

SIZES = {"mxfp8": 32, "mxfp8_2d": 32, "nvfp4": 16, "fp8_block": 1, "bf16": 1}


def member(rows=64, cols=96, start=0, format="mxfp8", bucket=0, expert=0):
    return Member(
        parameter="decoder.layers.3.mlp.experts.linear_fc1.weight",
        layer=3,
        expert=expert,
        rows=rows,
        cols=cols,
        format=format,
        bucket=bucket,
        start=start,
    )


@st.composite
def buckets(draw):
    """Members of mixed formats with padding between them, and a size that ``dp_size`` divides."""
    dp_size = draw(st.integers(1, 9))
    members, position = [], 0
    for expert in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(sorted(SIZES)))
        unit, limit = SIZES[name], 3 if SIZES[name] > 1 else 140
        rows, cols = (unit * draw(st.integers(1, limit)) for _ in range(2))
        position += draw(st.integers(0, 50))
        members.append(member(rows, cols, position, name, expert=expert))
        position = members[-1].end
    numel = -(-(position + draw(st.integers(0, 50))) // dp_size) * dp_size
    return draw(st.permutations(members)), numel, dp_size


def plans_of_all_ranks(members, numel, dp_size):
    return [plan_shards(members, numel, dp_rank, dp_size) for dp_rank in range(dp_size)]


@given(buckets())
@settings(max_examples=200, deadline=None)
def test_every_element_of_a_member_has_exactly_one_owner(bucket):
    """Joining the ranges of all ranks in order gives each member, from its start to its end."""
    members, numel, dp_size = bucket
    plans = plans_of_all_ranks(*bucket)
    for each in members:
        ranges = [owned for plan in plans for owned in plan.ranges if owned.member is each]
        edges = [0] + [owned.end for owned in ranges]
        assert edges == [owned.start for owned in ranges] + [each.numel]
        assert all(owned.numel > 0 for owned in ranges)


@given(buckets())
@settings(max_examples=200, deadline=None)
def test_member_and_shard_coordinates_name_the_same_element(bucket):
    _, numel, dp_size = bucket
    for plan in plans_of_all_ranks(*bucket):
        assert plan.shard_numel * dp_size == numel
        for owned in plan.ranges:
            assert plan.start + owned.shard_start == owned.member.start + owned.start
            assert owned.shard_end - owned.shard_start == owned.numel
            assert 0 <= owned.shard_start < owned.shard_end <= plan.shard_numel
        starts = [owned.shard_start for owned in plan.ranges]
        assert starts == sorted(starts)


def cuts_block_by_definition(each, start, end, direction):
    """Look at every block: are some of its elements in the range, and others not?"""
    if each.format == "bf16":
        return False
    block_rows, block_cols = get_format(each.format).block(direction)
    inside = {}
    for position in range(each.numel):
        row, col = divmod(position, each.cols)
        block = (row // block_rows, col // block_cols)
        inside.setdefault(block, set()).add(start <= position < end)
    return any(len(answers) == 2 for answers in inside.values())


@given(buckets())
@settings(max_examples=60, deadline=None)
def test_cut_flags_equal_the_definition_on_plans(bucket):
    members, numel, dp_size = bucket
    for plan in plans_of_all_ranks(*bucket):
        for owned in plan.ranges:
            flags = (owned.cuts_rowwise, owned.cuts_columnwise)
            assert flags == tuple(
                cuts_block_by_definition(owned.member, owned.start, owned.end, direction)
                for direction in DIRECTIONS
            )
            assert owned.cuts_block == any(flags)
        assert plan.cuts_block == any(owned.cuts_block for owned in plan.ranges)


@pytest.mark.parametrize(
    ("format", "rows", "cols"),
    [("mxfp8", 64, 64), ("mxfp8_2d", 64, 64), ("nvfp4", 32, 48), ("fp8_block", 129, 130)],
)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_cut_flags_equal_the_definition_on_any_range(format, rows, cols, data):
    """Edges are drawn near rows, blocks and block rows, where the answer changes.

    129 x 130 in blocks of 128 ends in a block row that is one high, and in narrow blocks.
    """
    each = member(rows, cols, format=format)
    units = st.sampled_from([1, 16, 32, 128, cols, 16 * cols, 32 * cols, 128 * cols])
    edges = st.builds(
        lambda unit, count, shift: min(max(unit * count + shift, 0), each.numel),
        units,
        st.integers(0, rows),
        st.sampled_from([0, 0, 0, -1, 1]),
    )
    start, end = sorted((data.draw(edges), data.draw(edges)))
    for direction in DIRECTIONS:
        got = each.cuts_block(start, end, direction)
        assert got == cuts_block_by_definition(each, start, end, direction)


CUTS = {  # format, range of a [64, 96] member -> cuts a rowwise, a columnwise block
    "all of it": ("mxfp8", 0, 64 * 96, False, False),
    "nothing": ("mxfp8", 96, 96, False, False),
    "one block row": ("mxfp8", 32 * 96, 64 * 96, False, False),
    "one row": ("mxfp8", 0, 96, False, True),
    "one rowwise block": ("mxfp8", 32, 64, False, True),
    "half a rowwise block": ("mxfp8", 32, 48, True, True),
    "one row of square blocks": ("mxfp8_2d", 0, 96, True, True),
    "a block row of square blocks": ("mxfp8_2d", 0, 32 * 96, False, False),
    "half a block row of NVFP4": ("nvfp4", 0, 8 * 96, True, True),
    "a block row of NVFP4": ("nvfp4", 16 * 96, 32 * 96, False, False),
    "an edge block is whole where the member ends": ("fp8_block", 0, 64 * 96, False, False),
    "part of it": ("fp8_block", 0, 32 * 96, True, True),
    "bf16 has no blocks": ("bf16", 1, 2, False, False),
}


@pytest.mark.parametrize(
    ("format", "start", "end", "rowwise", "columnwise"), CUTS.values(), ids=CUTS.keys()
)
def test_which_ranges_cut_a_block(format, start, end, rowwise, columnwise):
    each = member(format=format)
    assert each.cuts_block(start, end, "rowwise") == rowwise
    assert each.cuts_block(start, end, "columnwise") == columnwise


def test_a_plan_is_a_frozen_value():
    """[32, 96] elements of padding lie before, between and after two members; two ranks."""
    gap = 32 * 96
    members = [member(start=gap), member(start=4 * gap, expert=1)]
    plan = plan_shards(members, 8 * gap, 1, 2)
    (owned,) = plan.ranges
    assert (owned.member.expert, owned.start, owned.end, owned.shard_start) == (1, 0, 2 * gap, 0)
    assert (plan.start, plan.end, plan.shard_numel) == (4 * gap, 8 * gap, 4 * gap)
    assert not plan.cuts_block
    assert plan == plan_shards(reversed(members), 8 * gap, 1, 2)
    assert isinstance(hash(plan), int)
    with pytest.raises(FrozenInstanceError):
        plan.dp_rank = 0


def test_a_bucket_without_members_gives_empty_plans():
    assert plan_shards([], 64, 3, 4) == ShardPlan(dp_rank=3, dp_size=4, bucket_numel=64, ranges=())


REFUSED_PLANS = {
    "overlap": (
        ([member(), member(start=64 * 96 - 1, expert=1)], 2 * 64 * 96, 0, 2),
        r"expert 1\): expected a start from 6144 on, where .*expert 0\) ends, got 6143",
    ),
    "beyond the bucket": (
        ([member(start=2)], 64 * 96, 0, 2),
        r"expert 0\): expected an end within the 6144 elements of bucket 0, got 6146",
    ),
    "not divisible": (([member()], 64 * 96, 0, 5), r"divisible by 5 ranks, got 6144"),
    "two buckets": (
        ([member(), member(start=64 * 96, bucket=1)], 2 * 64 * 96, 0, 1),
        r"expected members of bucket 0, got bucket 1",
    ),
    "rank too large": (([member()], 64 * 96, 2, 2), r"expected a rank below 2, got rank 2"),
    "rank negative": (([member()], 64 * 96, -1, 2), r"expected a rank below 2, got rank -1"),
    "no ranks": (([member()], 64 * 96, 0, 0), r"expected a rank below 0, got rank 0"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED_PLANS.values(), ids=REFUSED_PLANS.keys())
def test_a_bucket_that_cannot_be_sharded_is_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        plan_shards(*arguments)


def test_a_member_must_fit_its_format():
    with pytest.raises(LayoutError, match=r"linear_fc1.weight \(layer 3, expert 0\): mxfp8 needs"):
        member(rows=48)
    with pytest.raises(LayoutError, match=r"expected at least one row .* got \[0, 96\] at 0"):
        member(rows=0)
    with pytest.raises(LayoutError, match=r"a start from 0 on, got \[64, 96\] at -1"):
        member(start=-1)
    with pytest.raises(ConfigError, match="mxfp8, mxfp8_2d, nvfp4, fp8_block, got 'mxfp9'"):
        member(format="mxfp9")


def test_a_member_knows_where_it_ends_and_what_it_is():
    each = replace(member(start=10), format="bf16", rows=3, cols=5)
    assert (each.numel, each.end, each.descriptor) == (15, 25, None)
    assert str(each) == "decoder.layers.3.mlp.experts.linear_fc1.weight (layer 3, expert 0)"
