"""Experts cut over two ranks are Megatron's cut experts, part by part and in every checkpoint."""

from typing import Any

import pytest
import torch

from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS, fake_quantize
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.formats import MXFP8
from moe_optim.formats.reference import quantize
from tests.support.bytes import assert_bytes_equal
from tests.support.modules import experts
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_tensors, pretrain

every_layout = pytest.mark.parametrize("layout", experts.LAYOUTS)
GROUPED = MoEOptimConfig(format="bf16")
ETP2 = ["--expert-tensor-parallel-size", "2"]
STEPS = ["--train-iters", "4", "--eval-interval", "1000", "--dist-ckpt-optim-fully-reshardable"]


def _compare() -> dict[str, tuple[Any, ...]]:
    experts.start_ranks(expert_tensor_parallel_size=2)
    config = experts.make_config(expert_tensor_parallel_size=2)
    # the whole has 96 columns, which MXFP8 could hold; half of them it cannot
    refused = r"^experts: linear_fc2 \[64, 48\] in mxfp8, whose blocks have 32"
    with pytest.raises(ConfigError, match=refused):
        experts.make_ours(config, format="mxfp8")
    return experts.compare_kinds(config)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Any, ...]]]:
    """Return initial values, passes and attributes on both ranks."""
    return run_ranks(2, _compare)


@every_layout
def test_every_rank_draws_what_megatron_draws_there(ranks, layout):
    for rank in ranks:
        assert_same_tensors(rank[layout][0], rank["stock"][0], what="initial")
    first, second = (rank["stock"][0] for rank in ranks)
    assert first["0.linear_fc1.weight"].shape == (experts.FFN, experts.HIDDEN)
    assert first["0.linear_fc2.weight"].shape == (experts.HIDDEN, experts.FFN // 2)
    assert not torch.equal(first["0.linear_fc1.weight"], second["0.linear_fc1.weight"])


@every_layout
def test_passes_of_every_rank_are_megatrons_to_the_bit(ranks, layout):
    """Outputs are summands, which the token dispatcher adds up; so are gradients of tokens."""
    for rank in ranks:
        assert_same_tensors(rank[layout][1], rank["stock"][1], what="passes")


@every_layout
def test_parameters_have_the_attributes_of_megatrons(ranks, layout):
    """Reduced over expert data parallelism, which differs from that of dense parameters here."""
    for rank in ranks:
        assert rank[layout][2] == rank["stock"][2]
        assert not rank["stock"][2]["linear_fc1.weight"]["allreduce"]


def _fake_quantize(compute: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return the operands of both directions and the same rows or columns of whole experts."""
    module = experts.make_ours(experts.make_config(expert_tensor_parallel_size=2), compute=compute)
    group = module.pg_collection.expt_tp
    found = []
    for linear, dim in ((module.linear_fc1, 1), (module.linear_fc2, 2)):
        if torch.distributed.get_rank() == 1:
            linear.weight.data *= 3  # the amax of an expert is that of one rank's part
        parts = [torch.empty_like(linear.weight.data) for _ in range(2)]
        torch.distributed.all_gather(parts, linear.weight.data, group=group)
        whole = torch.cat(parts, dim)
        bits = PER_EXPERT_GRIDS[compute].bits or "e4m3"
        values = fake_quantize(whole, whole.abs().amax((1, 2)), bits, backend="reference")
        expected = values.chunk(2, dim)[torch.distributed.get_rank(group)]
        for direction in ("rowwise", "columnwise"):
            found.append((f"{linear.name} {direction}", linear.operand(direction), expected))
    return found


def _fake_quantize_each() -> dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]]:
    experts.start_ranks(expert_tensor_parallel_size=2)
    return {compute: _fake_quantize(compute) for compute in PER_EXPERT_GRIDS}


def test_cut_experts_multiply_values_on_the_grid_of_whole_experts():
    """Uncalibrated: every rank takes the largest magnitude of all parts of an expert."""
    for rank in run_ranks(2, _fake_quantize_each):
        for compute, compared in rank.items():
            for name, operand, expected in compared:
                assert_bytes_equal(operand, expected.contiguous(), what=f"{compute} {name}")


# Training and checkpoints


def _train(flags: list[str], config: MoEOptimConfig | None) -> Record:
    """Train; ``extra`` holds the parameters of the experts at the end."""
    return pretrain(flags, config, observe=lambda model, _: experts.trained_values(model[0]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(saved) -> dict[str, list[Record]]:
    """Return four steps of Megatron's cut experts and of ours, saved after two."""
    configs = {
        layout: MoEOptimConfig(format="bf16", expert_layout=layout) for layout in experts.LAYOUTS
    }
    records = {}
    for name, config in {"stock": None, **configs}.items():
        save = ["--save", str(saved / name), "--save-interval", "2"]
        records[name] = run_ranks(2, _train, [*STEPS, *ETP2, *save], config)
    return records


@every_layout
@pytest.mark.extended
def test_cut_experts_train_as_megatrons(trained, layout):
    """Through Megatron's token dispatcher, which gathers and reduces over the two ranks."""
    for mine, theirs in zip(trained[layout], trained["stock"], strict=True):
        assert len(mine.losses) == 4
        assert mine.losses == theirs.losses
        assert_same_tensors(mine.extra, theirs.extra, what="trained")


@pytest.mark.extended
def test_experts_cut_like_the_dense_parameters_train_as_megatrons():
    """With tensor and sequence parallelism of 2, experts are reduced in the groups of the rest."""
    flags = [*STEPS, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    ours, stock = (run_ranks(2, _train, flags, config) for config in (GROUPED, None))
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.losses == theirs.losses
        assert_same_tensors(mine.extra, theirs.extra, what="trained")


@pytest.mark.parametrize("source", ["stock", "grouped"])
@pytest.mark.extended
def test_cut_experts_load_whole_with_gate_and_up_in_their_halves(trained, saved, source):
    """On one rank without tensor parallelism: gates of both ranks, then ups of both."""
    load = ["--load", str(saved / source), "--ckpt-step", "4", "--finetune", "--no-load-optim"]
    flags = ["--train-iters", "1", "--eval-interval", "9", "--lr", "0", "--min-lr", "0", *load]
    (whole,) = run_ranks(1, _train, flags, GROUPED)
    first, second = (record.extra for record in trained[source])
    assert whole.extra.keys() == first.keys()
    for name, values in whole.extra.items():
        parts = [first[name], second[name]]
        if "linear_fc1" in name:
            gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
            expected = torch.cat([*gates, *ups])
        else:
            expected = torch.cat(parts, dim=1)
        assert_bytes_equal(values, expected, what=name)


def test_quantized_cut_experts_are_the_bytes_of_their_masters():
    """Each rank quantizes its own part; blocks do not reach across."""
    flags = [*STEPS, *ETP2, "--moe-ffn-hidden-size", "128"]
    for record in run_ranks(2, _train, flags, MoEOptimConfig(format="mxfp8")):
        names = [name for name in record.masters if ".experts." in name]
        assert len(names) == 2 * 2  # layers, linears
        for name in names:
            data = record.weights[f"{name}.rowwise_data"]
            buffers = quantize(record.masters[name].view(data.shape), MXFP8).buffers()
            for buffer, expected in buffers.items():
                assert_bytes_equal(record.weights[f"{name}.{buffer}"], expected, what=name)
