"""Every rank of an engine ends with exactly its bytes of the experts that training holds.

Ranks are gloo's. A Megatron model steps once, so that its weights are behind their masters; the
oracle quantizes whole masters and cuts them as engines do.
"""

import io

import pytest
import torch
import torch.distributed as dist

from moe_optim.errors import LayoutError
from moe_optim.formats import get_format, reference
from moe_optim.rollout.shards import EngineLayout, Shard, StackedTensor
from moe_optim.rollout.stacked_experts import plan_transfers, stacked_experts
from moe_optim.rollout.transfer_plan import plan_of_shards
from moe_optim.rollout.transfers import execute
from tests.rollout.test_cut_experts import FFN, whole_masters
from tests.rollout.test_export_weights import Setup, build, initialize, step
from tests.rollout.test_transfer_plan import cut, engine_experts
from tests.support.bytes import assert_same_tensors
from tests.support.inputs import SENTINEL
from tests.support.modules import serving
from tests.support.ranks import run_ranks

pytest.importorskip("megatron.core")


def whole_weights(chunks, optimizer, format):
    """Return the tensors of every expert of the model, by linear of a layer and expert number."""
    from megatron.core.utils import unwrap_model

    names = [
        f"model.layers.{layer.layer_number - 1}.mlp.experts.{name}_"
        for chunk in chunks
        for layer in unwrap_model(chunk).decoder.layers
        for name in ("w13", "w2")
    ]
    mine = {}
    for name, master in zip(names, whole_masters(chunks, optimizer), strict=True):
        if format == "bf16":
            mine[name] = [{"weight": one} for one in master]
        else:
            quantized = reference.quantize(master.float(), get_format(format))
            mine[name] = serving.experts_of(quantized)
    packed = io.BytesIO()
    torch.save(mine, packed)
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, packed.getvalue())
    held = [torch.load(io.BytesIO(one)) for one in stages]
    return {name: experts for one in held for name, experts in one.items()}


def engine_weights(whole, layout, rank):
    """Cut whole weights as the engine's loaders do, into parameters of one of its ranks."""
    parts, part = layout.tensor_parallel_size, rank % layout.tensor_parallel_size
    found = {}
    for prefix, experts in whole.items():
        own = [experts[number] for number in engine_experts(layout, rank, len(experts))]
        is_up = prefix.endswith("w13_")
        for suffix in own[0].keys() - {"weight_shape"}:
            tensors = [one[suffix] for one in own]
            if tensors[0].dim() == 0:  # one global scale for the gate, and one for the up
                cut = [one.repeat(2 if is_up else 1) for one in tensors]
            elif is_up:
                halves = [[half.chunk(parts)[part] for half in one.chunk(2)] for one in tensors]
                cut = [torch.cat(both) for both in halves]
            else:
                cut = [one.chunk(parts, 1)[part] for one in tensors]
            found[prefix + suffix] = torch.stack(cut).contiguous()
    return found


def _update(setups):
    me, counts = dist.get_rank(), {}
    for name, (setup, layouts) in setups.items():
        chunks, optimizer = build(setup)
        step(chunks, optimizer)
        sources, again = stacked_experts(chunks), stacked_experts(chunks)
        for key in sources:
            pointers = [[one.data_ptr() for one in every[key]] for every in (sources, again)]
            assert "scale" in key or pointers[0] == pointers[1], f"{name}: copied {key}"
        whole = whole_weights(chunks, optimizer, setup.knobs["format"])
        for layout in layouts:
            ranks = list(reversed(range(dist.get_world_size())))[: layout.size]
            plan = plan_transfers(chunks, layout)
            want = engine_weights(whole, layout, ranks.index(me)) if me in ranks else {}
            got = {key: torch.empty_like(one) for key, one in want.items()}
            for one in got.values():
                one.view(torch.uint8).fill_(SENTINEL)
            execute(plan, sources, got, engine_ranks=ranks, message_bytes=30_000)
            assert_same_tensors(got, want, what=f"{name} {layout}")
            counts[name] = counts.get(name, 0) + len(got)
    return counts


ONE, TP = EngineLayout(), EngineLayout(tensor_parallel_size=2)
IN_TURN = EngineLayout(expert_parallel_size=2, placement="round_robin")
LAYOUTS = (ONE, TP, IN_TURN)
CUT, SPREAD = {"expert_tensor_parallel_size": 2}, {"expert_model_parallel_size": 2}


def setup(format, sizes, **knobs):
    return Setup(sizes, {"format": format, **knobs}, model=FFN)


TWO = {
    "mxfp8, cut in training": (setup("mxfp8", CUT), LAYOUTS),
    "mxfp8_2d, a parameter an expert": (
        setup("mxfp8_2d", SPREAD, expert_layout="indexed"),
        LAYOUTS,
    ),
    "fp8_block": (setup("fp8_block", CUT), LAYOUTS),
    "nvfp4_rows": (setup("nvfp4_rows", SPREAD), LAYOUTS),
    "int4, replicated": (setup("int4", {}), LAYOUTS),
    "bf16": (setup("bf16", CUT), LAYOUTS),
}
FOUR = {
    "fp8_block, cut and spread": (
        setup("fp8_block", CUT | SPREAD),
        (
            EngineLayout(expert_parallel_size=2, tensor_parallel_size=2),
            EngineLayout(expert_parallel_size=3),
        ),
    ),
    "mxfp8_2d in two stages, replicated": (
        setup("mxfp8_2d", {"pipeline_model_parallel_size": 2}),
        (EngineLayout(tensor_parallel_size=2, replicas=2), IN_TURN),
    ),
}


def _on_two_ranks():
    initialize()
    return _update(TWO), [_misfit(change) for change in MISFITS], _refused()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, _on_two_ranks)


def test_an_engine_has_its_bytes_of_every_format(ranks):
    per_layer = {"bf16": 2, "nvfp4_rows": 6}
    for (counts, *_), layouts in zip(ranks, (2, 3), strict=True):
        assert counts == {
            name: 2 * per_layer.get(one.knobs["format"], 4) * layouts
            for name, (one, _) in TWO.items()
        }


def _on_four_ranks():
    initialize()
    counts = _update(FOUR)
    return sum(counts.values()), update_random_bytes(
        "cpu", training_ranks=[3, 1], engine_ranks=[0, 2]
    )


def test_engines_have_their_bytes_of_experts_that_are_cut_spread_staged_and_replicated():
    """Also an engine of other ranks than training's, in tensors of any strides."""
    assert run_ranks(4, _on_four_ranks) == [(16, 5), (24, 0), (32, 5), (32, 0)]


ITEMS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.int32}
TENSORS = [
    StackedTensor(name=name, shape=(6, rows, columns), itemsize=size, axis=axis, runs=runs)
    for name, rows, columns, size, axis, runs in (
        ("w13_weight", 64, 48, 1, 0, 2),
        ("w13_scale", 64, 8, 4, 0, 2),
        ("w2_weight", 48, 64, 4, 1, 1),
        ("w2_scale", 48, 8, 2, 1, 1),
        ("w13_global", 2, 4, 4, None, 2),
    )
]


def update_random_bytes(device, *, training_ranks, engine_ranks):
    """Send random bytes to an engine, and return by tensor whether its parts are right.

    Two training ranks hold three experts each, one tensor an expert or one of all; the engine's
    two cut every expert, and store ``w2`` columns first.
    """
    generator = torch.Generator().manual_seed(3)
    whole = {one: torch.randint(256, one.shape, generator=generator) for one in TENSORS}
    halves = [Shard(experts=tuple(range(first, first + 3))) for first in (0, 3)]
    held = [{one.name: half for one in TENSORS} for half in halves]
    plan = plan_of_shards(TENSORS, held, EngineLayout(tensor_parallel_size=2))
    me, sources, targets, want = dist.get_rank(), {}, {}, {}
    for one, values in whole.items():
        values = values.to(torch.uint8)
        if me in training_ranks:
            half = halves[training_ranks.index(me)]
            own = cut(values, one, half).view(ITEMS[one.itemsize]).to(device)
            sources[one.name] = own if one.axis else list(own)
        if me in engine_ranks:
            shard = Shard(experts=tuple(range(6)), part=engine_ranks.index(me), parts=2)
            want[one.name] = cut(values, one, shard).contiguous().view(ITEMS[one.itemsize])
            place = torch.zeros_like(want[one.name], device=device)
            targets[one.name] = place.mT.contiguous().mT if one.axis else place
    execute(
        plan, sources, targets, training_ranks=training_ranks, engine_ranks=engine_ranks,
        message_bytes=500,
    )  # fmt: skip
    assert_same_tensors({name: one.cpu() for name, one in targets.items()}, want)
    return len(targets)


def _misfit(change):
    """Return what every rank is told if rank 1, the engine, does not fit the plan."""
    (one, *_) = TENSORS
    everything = Shard(experts=tuple(range(6)))
    plan = plan_of_shards([one], [{one.name: everything}], EngineLayout())
    values = {one.name: torch.zeros(one.shape, dtype=torch.uint8)}
    targets = {"none": {}, "size": {one.name: values[one.name][1:]}}.get(change, values)
    if change == "transposed":
        targets = {one.name: [torch.zeros(48, 64, dtype=torch.uint8) for _ in range(6)]}
    if change == "items":
        targets = {one.name: values[one.name].view(torch.int32)}
    try:
        execute(plan, values, targets, engine_ranks=[1, 0] if change == "ranks" else [1])
    except LayoutError as error:
        return str(error)
    return None


MISFITS = {
    "none": (
        "w13_weight: expected a tensor of [6, 64, 48], 1 bytes per item, or one for each expert, "
        "got none."
    ),
    "size": "got 1 of [5, 64, 48] torch.uint8.",
    "transposed": "got 6 of [48, 64] torch.uint8.",
    "items": "got 1 of [6, 64, 12] torch.int32.",
    "ranks": "engine_ranks: expected 1 different ranks, as planned, got [1, 0].",
}


def test_tensors_and_ranks_other_than_planned_are_refused_on_all_ranks(ranks):
    for _, errors, _ in ranks:
        for said, error in zip(MISFITS.values(), errors, strict=True):
            assert said in error


def _refused():
    chunks, _ = build(setup("fp8_block", SPREAD))
    try:
        plan_transfers(chunks, EngineLayout(tensor_parallel_size=4))
    except LayoutError as error:
        return str(error)
    return None


def test_an_engine_that_cuts_blocks_is_refused_on_every_rank(ranks):
    said = [one[-1] for one in ranks]
    assert said[0] == said[1]
    assert "w13_weight: expected rows of gate and of up of the engine in 4 even parts" in said[0]
    assert "whole blocks of 128, got 256, 64 for each part" in said[0]
