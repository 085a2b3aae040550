"""Training with quantized experts through Megatron's own loop: what must hold to the bit."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import run_ranks
from tests.support.states.masters import assert_weights_come_from_masters
from tests.support.training import (
    OVERLAP,
    Record,
    assert_same_run,
    assert_same_tensors,
    pretrain,
    weight_bytes,
)

pytestmark = pytest.mark.slow

MXFP8 = MoEOptimConfig(format="mxfp8")
STEPS = ["--train-iters", "4"]
NEVER = "1000000"
RUN = [*STEPS, "--eval-interval", NEVER]


def _train(flags: list[str], config: MoEOptimConfig) -> Record:
    return pretrain(flags, config, observe=assert_weights_come_from_masters)


@functools.cache
def _trained_once(ranks: int, flags: tuple[str, ...]) -> list[Record]:
    return run_ranks(ranks, _train, [*flags], MXFP8)


def trained(ranks: int, flags: list[str]) -> list[Record]:
    """Return an MXFP8 run that several tests compare with, made once and left alone by all."""
    return _trained_once(ranks, tuple(flags))


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [pytest.param(1, [], marks=pytest.mark.extended),
     pytest.param(2, [], marks=pytest.mark.extended),
     (2, ["--expert-model-parallel-size", "2"]),
     pytest.param(4, ["--expert-model-parallel-size", "2"], marks=pytest.mark.extended),
     pytest.param(4, ["--expert-model-parallel-size", "4"], marks=pytest.mark.extended),
     pytest.param(4, ["--global-batch-size", "8"], marks=pytest.mark.extended)],
    ids=["dp1", "dp2", "ep2 edp1", "ep2 edp2", "ep4 edp1", "dp4"],
)  # fmt: skip
def test_overlap_changes_nothing_and_weights_come_from_masters(ranks: int, parallel: list[str]):
    """At every topology: gathering in the forward pass equals gathering in the step, and after 4
    steps every byte of every weight is the quantized master."""
    plain = trained(ranks, [*RUN, *parallel])
    overlapped = trained(ranks, [*RUN, *parallel, *OVERLAP])
    for rank in range(ranks):
        assert plain[rank].extra == 4  # fc1 and fc2 of two layers
        assert plain[rank].classes == {"GroupedDistributedOptimizer"}
        assert_same_run(overlapped[rank], plain[rank], what=f"rank {rank}")
    losses = plain[0].losses
    assert losses[4] < losses[1]


@pytest.mark.parametrize(
    "format",
    [
        pytest.param("mxfp8_2d", marks=pytest.mark.extended),
        pytest.param("nvfp4", marks=pytest.mark.extended),
        "fp8_block",
    ],
)
def test_every_format_trains_from_its_masters(format: str):
    """The loop does not know the format: bytes come from masters and the loss falls with each."""
    flags = [*STEPS, *OVERLAP, "--eval-interval", "2"]
    for record in run_ranks(2, _train, flags, MoEOptimConfig(format=format)):
        assert record.extra == 4
        assert record.losses[4] < record.losses[1]


@pytest.mark.parametrize(
    "format",
    [
        "nvfp4",
        pytest.param("mxfp8_2d", marks=pytest.mark.extended),
        pytest.param("mxfp8", marks=pytest.mark.extended),
        pytest.param("fp8_block", marks=pytest.mark.extended),
    ],
)
def test_wires_and_layouts_agree_where_shards_cut_blocks(format: str):
    """On 3 ranks, in both layouts, quantized bytes on the wire and bf16 give the same losses, and
    the same bytes on every rank.

    Buckets of one weight: 16,384 and 8,192 elements a rank, of which the latter cut rows of 96.
    """
    flags = ["--train-iters", "4", "--global-batch-size", "6", "--ddp-bucket-size", "20000"]
    flags += [*OVERLAP, "--eval-interval", NEVER]
    runs = {
        (wire, layout): run_ranks(
            3, _train, flags, MoEOptimConfig(format=format, wire=wire, layout=layout)
        )
        for wire, layout in (("bf16", "stock"), ("quantized", "aligned"))
    }
    expected = runs.pop(("bf16", "stock"))
    for kind, records in runs.items():
        for rank, record in enumerate(records):
            assert record.losses == expected[rank].losses, kind
            assert_same_tensors(record.weights, expected[rank].weights, what=f"{kind} {rank}")


@pytest.mark.extended
def test_indexed_equals_grouped():
    """One parameter an expert or one a linear: losses and bytes are the same (clip 0: a norm sums
    by parameter)."""
    flags = [*RUN, *OVERLAP]
    grouped = trained(2, flags)[0]
    indexed = run_ranks(2, _train, flags, MoEOptimConfig(format="mxfp8", expert_layout="indexed"))
    assert indexed[0].losses == grouped.losses
    for name, buffer in grouped.weights.items():
        if ".experts." not in name:
            assert_bytes_equal(indexed[0].weights[name], buffer, what=name)
            continue
        parameter, _, kind = name.rpartition(".")
        for expert in range(4):
            got = indexed[0].weights[f"{parameter}{expert}.{kind}"]
            assert_bytes_equal(got[0], buffer[expert], what=f"{name} of expert {expert}")


@pytest.mark.extended
def test_wgrad_through_autograd_equals_fused():
    """Adding weight gradients straight into main_grad gives the bytes that autograd gives."""
    flags = [*RUN, *OVERLAP]
    config = MoEOptimConfig(format="mxfp8", fuse_wgrad_accumulation=False)
    for fused, unfused in zip(trained(2, flags), run_ranks(2, _train, flags, config), strict=True):
        assert_same_run(unfused, fused, what="unfused")


@pytest.mark.extended  # the rows of test_ten_rows.py are evaluated in between, too
@pytest.mark.parametrize("overlap", [[], OVERLAP], ids=["no overlap", "overlap"])
def test_train_eval_train_equals_train_only(overlap: list[str]):
    """Evaluating between steps leaves no trace in losses, masters, moments or weights."""
    only = trained(2, [*RUN, *overlap])
    between = run_ranks(2, _train, [*STEPS, *overlap, "--eval-interval", "2"], MXFP8)
    for rank in range(2):
        assert len(between[rank].validation_losses) > len(only[rank].validation_losses)
        between[rank].validation_losses = only[rank].validation_losses
        assert_same_run(between[rank], only[rank], what=f"rank {rank}")


@pytest.mark.parametrize(
    ("ranks", "overlap", "reshardable"),
    [
        (2, OVERLAP, []),
        pytest.param(*(2, [], ["--dist-ckpt-optim-fully-reshardable"]), marks=pytest.mark.extended),
        pytest.param(
            3,
            OVERLAP,
            ["--dist-ckpt-optim-fully-reshardable", "--ddp-bucket-size", "20000"],
            marks=pytest.mark.extended,
        ),
    ],
    ids=["dp_reshardable", "fully_reshardable, no overlap", "fully_reshardable, padded buckets"],
)
def test_resume_continues_to_the_bit(
    ranks: int, overlap: list[str], reshardable: list[str], tmp_path: Path
):
    """A run that stops after 2 of 4 steps and loads its checkpoint ends as one that never did.

    Megatron 0.19 saves wrong states where buckets are padded: of all but the first bucket.
    """
    batch = ["--global-batch-size", "6"]  # for 2 ranks and for 3
    flags = [*STEPS, *batch, *overlap, *reshardable, "--eval-interval", "3"]
    whole = run_ranks(ranks, _train, flags, MXFP8)
    folder = str(tmp_path / "checkpoints")
    run_ranks(ranks, _train, [*flags, "--save", folder, "--exit-interval", "2"], MXFP8)
    rest = run_ranks(ranks, _train, [*flags, "--load", folder], MXFP8)
    shutil.rmtree(folder)
    for rank in range(ranks):
        assert set(rest[rank].losses) == {3, 4}
        whole[rank].losses = {step: whole[rank].losses[step] for step in rest[rank].losses}
        rest[rank].validation_losses = whole[rank].validation_losses
        assert_same_run(rest[rank], whole[rank], what=f"rank {rank}")


@pytest.mark.extended
def test_a_checkpoint_of_one_layout_loads_in_the_other(tmp_path: Path):
    """Buckets of 53,760 and of 53,376 elements on 3 ranks: the shards begin elsewhere, and training
    goes on to the bit."""
    small = ["--moe-ffn-hidden-size", "208", "--ddp-bucket-size", "20000"]
    flags = [*STEPS, *small, "--global-batch-size", "6", *OVERLAP, "--eval-interval", NEVER]
    aligned, stock = (MoEOptimConfig(format="nvfp4", layout=to) for to in ("aligned", "stock"))
    folder = str(tmp_path / "checkpoints")
    whole = run_ranks(3, _train, flags, aligned)
    run_ranks(3, _train, [*flags, "--save", folder, "--exit-interval", "2"], aligned)
    rest = run_ranks(3, _train, [*flags, "--load", folder], stock)
    for rank in range(3):
        assert rest[rank].losses == {step: whole[rank].losses[step] for step in (3, 4)}
        assert_same_tensors(rest[rank].weights, whole[rank].weights, what=f"rank {rank}")


def _weights_after_load(flags: list[str]) -> dict[str, torch.Tensor]:
    """Bytes of all quantized weights right after loading, before the first step."""

    def bytes_now(model: list[Any], _optimizer: Any) -> dict[str, torch.Tensor]:
        named = model[0].module.named_parameters()
        return {k: v for n, p in named for k, v in weight_bytes(n, p).items()}

    return pretrain(flags, MXFP8, observe=bytes_now).extra


def test_loading_derives_weights_from_masters(tmp_path: Path):
    """Loaded weights are byte for byte the saved ones: they come from the masters, not from the
    dequantized values in the checkpoint, which would move scales."""
    folder = str(tmp_path / "checkpoints")
    flags = [*STEPS, *OVERLAP, "--eval-interval", NEVER]
    saved = run_ranks(2, _train, [*flags, "--save", folder], MXFP8)
    loaded = run_ranks(2, _weights_after_load, [*flags, "--load", folder])  # nothing left to train
    for rank in range(2):
        assert_same_tensors(loaded[rank], saved[rank].weights, what=f"rank {rank}")
