"""Tensor, sequence and pipeline parallelism, accumulation and several optimizer instances."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.states.masters import assert_weights_come_from_masters
from tests.support.training import OVERLAP, Record, assert_same_run, assert_same_tensors, pretrain

pytestmark = pytest.mark.slow

RUN = ["--train-iters", "3", "--eval-interval", "2"]
CUT_EXPERTS = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
CUT_EXPERTS += ["--moe-ffn-hidden-size", "128"]  # 64 a rank
TP2 = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
TP2 += ["--expert-tensor-parallel-size", "1"]
EP2 = ["--expert-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
VIRTUAL = ["--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
INSTANCES = ["--num-distributed-optimizer-instances", "2", "--global-batch-size", "8"]

TOPOLOGIES = {  # name -> ranks, flags
    "dp1": (1, []),
    "dp2": (2, []),
    "dp4": (4, ["--global-batch-size", "8"]),
    "ep2": (2, EP2),
    "ep2 edp2": (4, EP2),
    "ep4": (4, ["--expert-model-parallel-size", "4"]),
    "tp2": (2, TP2),
    "tp2 etp2": (2, CUT_EXPERTS),
    "tp2 ep2": (2, [*TP2, *EP2]),
    "tp2 ep2 edp2": (4, [*TP2, *EP2]),
    "pp2": (2, PP2),
    "pp2, 2 chunks": (2, [*PP2, *VIRTUAL]),
    "pp2 tp2 ep2": (4, [*PP2, *TP2, *EP2]),
    "2 instances": (4, INSTANCES),
}


def topologies(*names: str, extended: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test at each of these topologies; the extended ones are left to ``make test-all``."""
    cases = [pytest.param(*TOPOLOGIES[name], id=name) for name in names]
    cases += [
        pytest.param(*TOPOLOGIES[name], id=name, marks=pytest.mark.extended) for name in extended
    ]
    return pytest.mark.parametrize(("ranks", "parallel"), cases)


# bf16 experts: what Megatron's own optimizer does

BF16 = MoEOptimConfig(format="bf16", layout="stock")
BF16_UNFUSED = MoEOptimConfig(format="bf16", layout="stock", fuse_wgrad_accumulation=False)


def _train_bf16(flags: list[str], config: MoEOptimConfig, plugin: bool) -> Record:
    return pretrain(flags, config, optimizer=plugin)


def assert_equals_stock(ranks: int, flags: list[str], config: MoEOptimConfig = BF16) -> None:
    stock = run_ranks(ranks, _train_bf16, [*RUN, *flags], config, False)
    ours = run_ranks(ranks, _train_bf16, [*RUN, *flags], config, True)
    for rank in range(ranks):
        assert stock[rank].classes == {"DistributedOptimizer"}
        assert ours[rank].classes == {"GroupedDistributedOptimizer"}
        assert_same_run(ours[rank], stock[rank], what=f"rank {rank}")
    assert len(ours[-1].losses) == 3
    assert len(ours[-1].validation_losses) == 2  # after 2 steps, and at the end


@topologies("pp2, 2 chunks", extended=("tp2", "tp2 etp2", "tp2 ep2 edp2", "pp2", "2 instances"))
def test_bf16_experts_train_as_under_megatrons_optimizer(ranks: int, parallel: list[str]):
    """Losses, masters, moments and weights of every rank and model chunk are the same to the bit,
    gathers overlapped and gradients clipped by a norm over all ranks."""
    assert_equals_stock(ranks, [*parallel, *OVERLAP, "--clip-grad", "1.0"])


@pytest.mark.parametrize(
    ("config", "reduced"),
    [
        pytest.param(BF16, [], id="fused wgrad in fp32", marks=pytest.mark.extended),
        pytest.param(BF16_UNFUSED, ["--grad-reduce-in-bf16"], id="wgrad by autograd in bf16"),
        pytest.param(
            BF16, ["--grad-reduce-in-bf16"], id="fused wgrad in bf16", marks=pytest.mark.extended
        ),
        pytest.param(BF16_UNFUSED, [], id="wgrad by autograd in fp32", marks=pytest.mark.extended),
    ],
)
def test_accumulated_gradients_are_megatrons(reduced: list[str], config: MoEOptimConfig):
    """Four micro-batches a step and rank, summed and reduced in either precision."""
    assert_equals_stock(
        2, [*reduced, "--micro-batch-size", "1", "--global-batch-size", "8"], config
    )


# Quantized experts

MXFP8 = MoEOptimConfig(format="mxfp8")


def _train_mxfp8(flags: list[str], config: MoEOptimConfig = MXFP8) -> Record:
    return pretrain(flags, config, observe=assert_weights_come_from_masters)


@topologies(
    "tp2 ep2",
    extended=(
        *("dp1", "dp2", "dp4", "ep2", "ep2 edp2", "ep4"),
        *("tp2", "tp2 etp2", "pp2 tp2 ep2", "pp2, 2 chunks", "2 instances"),
    ),
)
def test_overlap_and_resuming_change_nothing_and_weights_come_from_masters(
    ranks: int, parallel: list[str], tmp_path: Path
):
    """In every model chunk of every rank, overlapped gathers give what gathers in the step give,
    which is the oracle's bytes of the masters. A run that loads what the overlapped one saved in
    the middle ends as it did."""
    plain = run_ranks(ranks, _train_mxfp8, [*RUN, *parallel])
    flags, folder = [*RUN, *parallel, *OVERLAP], str(tmp_path / "checkpoints")
    overlapped = run_ranks(ranks, _train_mxfp8, [*flags, "--save", folder, "--save-interval", "2"])
    rest = run_ranks(ranks, _train_mxfp8, [*flags, "--load", folder, "--ckpt-step", "2"])
    for rank in range(ranks):
        assert plain[rank].classes == {"GroupedDistributedOptimizer"}
        assert plain[rank].extra == len(
            {name.rpartition(".")[0] for name in plain[rank].weights if ".experts." in name}
        )
        assert plain[rank].extra in {2, 4}  # fc1 and fc2 of one layer or two
        assert_same_run(overlapped[rank], plain[rank], what=f"rank {rank}")
        end = replace(
            plain[rank],
            losses={step: loss for step, loss in plain[rank].losses.items() if step > 2},
            validation_losses=rest[rank].validation_losses,
        )
        assert_same_run(rest[rank], end, what=f"rank {rank}, resumed")
    losses = plain[-1].losses
    assert losses[3] < losses[1]
    assert set(rest[-1].losses) == {3}


# What is copied is the same


def test_instances_keep_equal_copies():
    """Each instance has all masters, shared out between its two ranks; gradients are those of all
    four, so weights are equal everywhere and masters on every second rank."""
    records = run_ranks(4, _train_mxfp8, [*RUN, *INSTANCES])
    for rank, twin in ((0, 2), (1, 3)):
        assert_same_tensors(records[rank].masters, records[twin].masters, what="master")
    for record in records[1:]:
        assert_same_tensors(record.weights, records[0].weights, what="weight")
