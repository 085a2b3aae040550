"""A transfer plan fills every engine rank, each byte once, with bytes that the sender owns.

The oracle numbers every byte of a whole tensor and cuts the numbers by plain torch, as Megatron and
engines cut weights.
"""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.rollout.shards import EngineLayout, Shard, StackedTensor
from moe_optim.rollout.transfer_plan import plan_of_shards


def numbered(tensor):
    """Number every byte of a whole tensor, gate rows before up rows."""
    experts, rows, columns = tensor.shape
    return torch.arange(experts * rows * columns).view(tensor.shape)


def cut(values, tensor, shard):
    """Return a rank's part of numbered bytes, rows of gate and of up apart."""
    own = values[list(shard.experts)]
    if tensor.axis is None:
        return own
    if tensor.axis == 1:
        return own.chunk(shard.parts, 2)[shard.part]
    halves = own.chunk(tensor.runs, 1)
    return torch.cat([half.chunk(shard.parts, 1)[shard.part] for half in halves], 1)


def trained(values, tensor, shard):
    """Return a training rank's part: as :func:`cut`, or of rows that alternate by blocks."""
    if tensor.interleave is None:
        return cut(values, tensor, shard)
    halves = [half.split(tensor.interleave, 1) for half in values.chunk(2, 1)]
    mixed = torch.cat([one for pair in zip(*halves, strict=True) for one in pair], 1)
    return mixed[list(shard.experts)].chunk(shard.parts, 1)[shard.part]


def engine_experts(layout, rank, experts):
    """Return the experts of an engine rank, dealt out one by one."""
    number = rank // layout.tensor_parallel_size % layout.expert_parallel_size
    ranks = layout.expert_parallel_size
    if layout.placement == "round_robin":
        return [e for e in range(experts) if e % ranks == number]
    hands = [experts // ranks + (one < experts % ranks) for one in range(ranks)]
    first = sum(hands[:number])
    return list(range(first, first + hands[number]))


def box(values, corner, shape):
    experts, rows, columns = shape
    stop = corner.expert + (experts - 1) * corner.step + 1
    return values[
        corner.expert : stop : corner.step,
        corner.row : corner.row + rows,
        corner.column : corner.column + columns,
    ]


def carry_out(plan, held):
    """Return what every engine rank has afterwards by tensor, and how often each byte was written.

    ``held`` has the numbered bytes of each training rank by tensor.
    """
    values, counts = {}, {}
    for rank in range(plan.engine.size):
        for name, shape in plan.target_shapes(rank).items():
            values[rank, name] = torch.full(shape, -1)
            counts[rank, name] = torch.zeros(shape, dtype=torch.int)
    for one in plan.transfers:
        source = box(held[one.sender][one.tensor], one.source, one.shape)
        assert source.shape == one.shape
        box(values[one.receiver, one.tensor], one.target, one.shape).copy_(source)
        box(counts[one.receiver, one.tensor], one.target, one.shape).add_(1)
    return values, counts


@st.composite
def jobs(draw):
    """Draw stacked tensors, the shards of training ranks, and an engine."""
    ep, etp, pp, dp, tp = (draw(st.sampled_from(some)) for some in ((1, 2, 3), *[(1, 2)] * 4))
    experts = ep * draw(st.integers(1, 3))
    engine = EngineLayout(
        expert_parallel_size=draw(st.integers(1, experts)),
        tensor_parallel_size=tp,
        placement=draw(st.sampled_from(["contiguous", "round_robin"])),
        replicas=draw(st.integers(1, 2)),
    )
    interleave = draw(st.sampled_from([None, 1, 2]))
    tensors = [
        StackedTensor(
            name=f"{layer}.{kind}", shape=(experts, rows, columns), itemsize=1, axis=axis,
            runs=runs, interleave=interleave if axis == 0 else None,
        )
        for layer in range(pp)
        for kind, rows, columns, axis, runs in (
            ("w13_weight", 8, 3, 0, 2), ("w2_weight", 3, 4, 1, 1), ("w13_scale", 2, 4, None, 1)
        )
    ]  # fmt: skip
    training = []
    for stage in range(pp):
        for _ in range(dp):
            for number in range(ep):
                first = number * experts // ep
                own = tuple(range(first, first + experts // ep))
                training += [
                    {
                        one.name: Shard(experts=own, part=part, parts=etp)
                        for one in tensors
                        if one.name.startswith(f"{stage}.")
                    }
                    for part in range(etp)
                ]
    order = draw(st.permutations(range(len(training))))
    beside = draw(st.dictionaries(st.integers(0, engine.size - 1), st.sampled_from(order)))
    return tensors, [training[number] for number in order], engine, beside


@settings(max_examples=50)
@given(jobs())
def test_every_byte_of_every_engine_rank_is_written_once_with_its_value(job):
    tensors, training, engine, beside = job
    plan = plan_of_shards(tensors, training, engine, beside=beside)
    whole = {one.name: (numbered(one), one) for one in tensors}
    held = [
        {name: trained(*whole[name], shard) for name, shard in shards.items()}
        for shards in training
    ]
    for rank, shards in enumerate(held):
        assert plan.source_shapes(rank) == {name: tuple(v.shape) for name, v in shards.items()}
    values, counts = carry_out(plan, held)
    for (rank, name), got in values.items():
        numbers, tensor = whole[name]
        own = engine_experts(engine, rank, tensor.shape[0])
        part = rank % engine.tensor_parallel_size
        shard = Shard(experts=tuple(own), part=part, parts=engine.tensor_parallel_size)
        assert torch.equal(got, cut(numbers, tensor, shard))
        assert (counts[rank, name] == 1).all()


def weight(**others):
    """Return the record of four experts of 256 rows of gate and as many of up."""
    sizes = {"name": "w13_weight", "shape": (4, 512, 64), "itemsize": 1, "axis": 0, "runs": 2}
    return StackedTensor(**sizes | others)


ALL = Shard(experts=(0, 1, 2, 3))


@pytest.mark.parametrize(
    ("block", "parts", "said"),
    [
        (128, 4, "4 even parts of whole blocks of 128, got 256, 64 for each part"),
        (1, 3, "3 even parts of whole blocks of 1, got 256, 85.3333 for each part"),
        (192, 1, "1 even parts of whole blocks of 192, got 256, 256 for each part"),
    ],
)
def test_a_cut_through_a_block_of_scales_is_refused_with_its_sizes(block, parts, said):
    engine = EngineLayout(tensor_parallel_size=parts)
    with pytest.raises(LayoutError, match=f"w13_weight: expected rows of gate and of up .*{said}"):
        plan_of_shards([weight(block=block)], [{"w13_weight": ALL}], engine)


def test_a_training_rank_that_cuts_a_block_is_refused_too():
    shards = [{"w13_weight": Shard(experts=ALL.experts, part=n, parts=4)} for n in range(4)]
    with pytest.raises(LayoutError, match="of training in 4 even parts of whole blocks of 128"):
        plan_of_shards([weight(block=128)], shards, EngineLayout())


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ([Shard(experts=(0, 1, 3))], "expert 2: no part"),
        ([Shard(experts=ALL.experts, part=1, parts=2)], "expert 0: part 1 of 2; expert 1"),
        ([ALL, Shard(experts=(3,), part=0, parts=2)], "expert 3: part 0 of 1, part 0 of 2"),
    ],
)
def test_missing_and_overlapping_parts_of_experts_are_refused(shards, said):
    """The second half of two, twice, has as many bytes as one whole expert."""
    with pytest.raises(LayoutError, match=f"w13_weight: expected every part .* got {said}"):
        plan_of_shards([weight()], [{"w13_weight": one} for one in shards], EngineLayout())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 0}, "replicas: expected at least 1, got 0"),
        ({"placement": "linear"}, "placement: expected one of contiguous, round_robin, got 'lin"),
    ],
)
def test_an_engine_that_does_not_exist_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineLayout(**options)


def test_whole_experts_travel_in_one_box_per_rank_pair():
    """Contiguous experts of one rank, and those that an engine deals out in turn, are not split."""
    shards = [{"w13_weight": Shard(experts=(n, n + 1))} for n in (0, 2)]
    for placement in ("contiguous", "round_robin"):
        engine = EngineLayout(expert_parallel_size=2, placement=placement)
        plan = plan_of_shards([weight()], shards, engine)
        assert len(plan.transfers) == {"contiguous": 2, "round_robin": 4}[placement]
    shards = [{"w13_weight": ALL}]
    for engine in (EngineLayout(), EngineLayout(expert_parallel_size=2, placement="round_robin")):
        assert len(plan_of_shards([weight()], shards, engine).transfers) == engine.size


def test_a_plan_travels_to_an_engine_and_is_divided_by_name():
    tensors = [weight(name=name) for name in ("a", "b")]
    plan = plan_of_shards(tensors, [dict.fromkeys("ab", ALL)], EngineLayout(replicas=2))
    assert pickle.loads(pickle.dumps(plan)) == plan
    some = plan.only({"b"})
    assert {one.tensor for one in some.transfers} == {"b"} == set(some.target_shapes(0))
    assert 2 * len(some.transfers) == len(plan.transfers)
