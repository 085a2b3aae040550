"""The amax of every expert is that of the masters of all ranks, after each requantization."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.buckets.layout import side_by_side
from moe_optim.config import MoEOptimConfig
from moe_optim.formats import FORMATS
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import PortableStorage
from moe_optim.weights.te.storage import TransformerEngineStorage
from tests.support.bytes import assert_bytes_equal
from tests.support.collectives import no_collectives
from tests.support.formats import REPRESENTATIVE_FORMATS
from tests.support.inputs import wide_range_weights, with_specials
from tests.support.modules import experts
from tests.support.modules.amax import amax_of, linears_of, saved_amaxes
from tests.support.ranks import run_ranks
from tests.support.states.masters import assert_weights_come_from_masters, full_master
from tests.support.te.te_stand_ins import Float8BlockwiseQTensor, GroupedTensor, MXFP8Tensor
from tests.support.training import OVERLAP, pretrain

RECORDING = {
    n: format for n, format in REPRESENTATIVE_FORMATS.items() if not format.has_global_amax
}


# What one gather records, without processes: every rank is an object

SHAPES = ((4, 64, 96), (2, 96, 32), (1, 32, 32))


def _portable(format: Any, slot: Any) -> Any:
    storage = PortableStorage(format, slot.shape, name=slot.name, record_amax=True)
    return torch.nn.Parameter(GroupedWeight(storage))


def _of_transformer_engine(format: Any, slot: Any) -> Any:
    """Return what stands in for its weight, with the storage that it gets while installed."""
    member = {"fp8_block": Float8BlockwiseQTensor}.get(format.name, MXFP8Tensor)
    weight: Any = GroupedTensor(member, format, torch.ones(slot.shape))
    if slot.shape[0] == 1:
        weight = weight.quantized_tensors[0]
    weight.quantized_storage = TransformerEngineStorage(weight, format, record_amax=True)
    assert weight.quantized_storage.amax.isnan().all()  # nobody has told
    return weight


def record_on_ranks(
    format: Any, masters: list[torch.Tensor], dp_size: int, make: Any
) -> list[list[Any]]:
    """Return the weights of all ranks after they have recorded; the all-reduce is a loop."""
    from moe_optim.buckets.gather import AmaxRecord, OwnedMaster

    slots = side_by_side([tuple(master.shape) for master in masters])
    shard = -(-slots[-1].end // (128 * dp_size)) * 128
    ranks, records, vectors = [], [], []
    for rank in range(dp_size):
        params, owned = [], []
        for slot, master in zip(slots, masters, strict=True):
            params.append(make(format, slot))
            part = slot.owned(rank, shard)
            if part:
                own = master.view(-1)[part.start : part.stop].clone()
                owned.append(OwnedMaster(param=params[-1], start=part.start, master=own))
        record = AmaxRecord.of(params)
        record.fill(owned)
        records.append(record)
        vectors.append(record.values)
        ranks.append(params)
    largest = torch.stack(vectors).amax(0)
    for record, vector in zip(records, vectors, strict=True):
        vector.copy_(largest)
        record.finish()
    return ranks


@pytest.mark.parametrize("dp_size", [1, 3, 8])
@pytest.mark.parametrize(
    ("make", "format"),
    [
        pytest.param(make, format, id=f"{make.__name__}-{name}")
        for make in (_portable, _of_transformer_engine)
        for name, format in RECORDING.items()
        if make is _portable or not format.is_row_only
    ],
)
def test_every_rank_records_the_amax_of_whole_experts(make: Any, format: Any, dp_size: int):
    """Shards cut experts anywhere; some ranks own nothing of most of them, and of 8 the last ones
    own nothing at all. NaN counts as zero, Inf and subnormals as they are; one expert is zero."""
    masters = [
        with_specials(wide_range_weights(*shape, seed=index), every=1009)
        for index, shape in enumerate(SHAPES)
    ]
    masters[0][2] = -0.0
    masters[1][1] = torch.nan
    for params in record_on_ranks(format, masters, dp_size, make):
        for param, master in zip(params, masters, strict=True):
            assert_bytes_equal(param.quantized_storage.amax, amax_of(master), what=format.name)
    assert amax_of(masters[0])[2] == 0 and amax_of(masters[0]).isinf().any()


def test_who_asks_for_nothing_pays_nothing():
    """No vector is made without a request, and none for a format that gathers its amaxes anyway."""
    from moe_optim.buckets.gather import AmaxRecord

    for format in FORMATS.values():
        for asked in (False, True):
            storage = PortableStorage(format, (2, 32, 128), record_amax=asked)
            record = AmaxRecord.of([torch.nn.Parameter(GroupedWeight(storage))])
            assert (record is not None) == (asked and not format.has_global_amax)
            assert (storage.amax is not None) == (asked or format.has_global_amax)


# Through Megatron's loop

WAYS = [("quantized", "aligned", "grouped"), ("bf16", "stock", "indexed")]
FIRST = ("mxfp8", WAYS[0])
FLAGS = ["--train-iters", "3", "--eval-interval", "1000"]
CUT_EXPERTS = ["--expert-tensor-parallel-size", "2", "--moe-ffn-hidden-size", "256"]


def expected_amaxes(model: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the amax of each expert's assembled master, by linear. Every rank must call it."""
    found = {}
    for name, linear in linears_of(model[0]).items():
        found[name] = torch.cat([amax_of(full_master(optimizer, w)) for w in linear.weights()])
    return found


def _watch_training(
    flags: list[str], config: MoEOptimConfig
) -> tuple[int, dict[str, torch.Tensor]]:
    """Compare after each step; return how many experts were compared, and what the last have."""
    expected: list[dict[str, torch.Tensor]] = []
    behind = 1 if "--overlap-param-gather" in flags else 0  # then the next forward gathers
    seen = []

    def compare(step: int, model: list[Any], optimizer: Any) -> None:
        expected.append(expected_amaxes(model, optimizer))
        if step > behind:
            for name, linear in linears_of(model[0]).items():
                want = expected[step - 1 - behind][name]
                assert_bytes_equal(linear.amax(), want, what=f"step {step}: {name}")
                seen.append(linear.amax())

    pretrain(flags, config, after_step=compare, observe=assert_weights_come_from_masters)
    return sum(map(len, seen)), expected[-1]


@pytest.mark.parametrize(
    ("format", "wire", "layout", "experts_as"),
    [
        pytest.param(format, *way, marks=[pytest.mark.extended] * ((format, way) != FIRST))
        for format, way in product(REPRESENTATIVE_FORMATS, WAYS)
    ],
)
def test_after_every_step_the_amaxes_are_those_of_the_masters(
    format: str, wire: str, layout: str, experts_as: str
):
    """On both of two ranks, to the bit. While a gather is pending they are still those of the
    weights as they are; and the bytes of the weights are the oracle's, recorded or not."""
    config = MoEOptimConfig(
        format=format, wire=wire, layout=layout, expert_layout=experts_as, record_amax=True
    )
    for compared, _ in run_ranks(2, _watch_training, [*FLAGS, *OVERLAP], config):
        assert compared == 2 * 2 * 2 * 4  # steps, layers, linears, experts


@pytest.mark.extended
@pytest.mark.parametrize("format", REPRESENTATIVE_FORMATS)
def test_after_every_step_of_muon_the_amaxes_are_those_of_the_masters(format: str):
    """Of whole experts, each of which one rank has stepped."""
    config = MoEOptimConfig(format=format, record_amax=True)
    for compared, _ in run_ranks(2, _watch_training, [*FLAGS, "--optimizer", "muon"], config):
        assert compared == 3 * 2 * 2 * 4  # steps, layers, linears, experts


@pytest.mark.parametrize(
    "parallel",
    [[], pytest.param(CUT_EXPERTS, marks=pytest.mark.extended)],
    ids=["shards cut experts", "tensor parallelism cuts experts"],
)
def test_a_checkpoint_holds_the_amaxes_of_whole_experts(tmp_path: Path, parallel: list[str]):
    """As plain tensors [layers, experts, 1, 1] fp32, those of the last step, gathered in the step
    as bf16; where each rank has half of every expert, the larger one of both halves."""
    config = MoEOptimConfig(
        format="fp8_block", wire="bf16", layout="stock", expert_layout="indexed", record_amax=True
    )
    flags = [*FLAGS, *parallel, "--save", str(tmp_path)]
    ranks = run_ranks(2, _watch_training, flags, config)
    assert [compared for compared, _ in ranks] == [3 * 2 * 2 * 4] * 2  # steps, layers, ...
    tensors = saved_amaxes(tmp_path / "iter_0000003")
    assert len(tensors) == 2
    for key, saved in tensors.items():
        of_ranks = [
            torch.stack([amax for name, amax in last.items() if name.endswith(key.split(".")[-2])])
            for _, last in ranks
        ]
        assert torch.equal(*of_ranks) == (not parallel)
        assert_bytes_equal(saved, torch.maximum(*of_ranks).view(2, 4, 1, 1), what=key)


# Experts cut over tensor-parallel ranks, and a traversal that communicates nothing


def _saved_amaxes(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a save would write of amaxes, by key."""
    with no_collectives():
        state = module.sharded_state_dict(prefix="experts.")
    entries = [entry for name, entry in state.items() if name.endswith("weight_amax")]
    assert len(entries) == 2
    return {entry.key: entry.data.view(-1) for entry in entries}


def _cut_experts(format: str) -> dict[str, Any]:
    from moe_optim.calibration.state_entries import synchronize_amax

    experts.start_ranks(expert_tensor_parallel_size=2)
    config = experts.make_config(expert_tensor_parallel_size=2, moe_ffn_hidden_size=128)
    module = experts.make_ours(config, format=format, record_amax=True)
    result = {"own": {name: linear.amax() for name, linear in linears_of(module).items()}}
    result["before"] = _saved_amaxes(module)
    buffers = module.linear_fc1.storage.quantized.buffers()
    with no_collectives(), pytest.raises(AssertionError, match="a rank communicates"):
        synchronize_amax([module])
    bytes_before = {name: buffer.clone() for name, buffer in buffers.items()}
    synchronize_amax([module])
    result["after"] = _saved_amaxes(module)
    for name, buffer in buffers.items():
        assert_bytes_equal(buffer, bytes_before[name], what=name)
    for linear in linears_of(module).values():
        linear.load_values(2 * torch.ones(linear.shape, dtype=torch.bfloat16))
    result["rewritten"] = _saved_amaxes(module)
    return result


@pytest.mark.parametrize("format", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.extended)])
def test_amaxes_of_cut_experts_are_found_before_keys_are_walked(format: str):
    """Each of two ranks holds half of every expert. Before ``synchronize_amax`` a save writes that
    it does not know; then the larger one of both halves; and not what weights were before."""
    ranks = run_ranks(2, _cut_experts, format)
    for linear in ("linear_fc1", "linear_fc2"):
        halves = [rank["own"][linear] for rank in ranks]
        assert not torch.equal(*halves)
        for rank in ranks:
            key = f"experts.experts.{linear}.weight_amax"
            assert rank["before"][key].isnan().all()
            assert_bytes_equal(rank["after"][key], torch.maximum(*halves), what=linear)
            assert rank["rewritten"][key].isnan().all()
