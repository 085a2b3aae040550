"""Training with quantized experts through Megatron's own loop: what must hold to the bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
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
WIDE = ["--hidden-size", "128", "--moe-ffn-hidden-size", "128"]


def _train(flags: list[str], config: MoEOptimConfig) -> Record:
    return pretrain(flags, config, observe=assert_weights_come_from_masters)


@pytest.mark.parametrize(
    "format",
    [
        "nvfp4",
        pytest.param("int4", marks=pytest.mark.extended),
        pytest.param("mxfp8_2d", marks=pytest.mark.extended),
        pytest.param("mxfp8", marks=pytest.mark.extended),
        pytest.param("fp8_block", marks=pytest.mark.extended),
        pytest.param("fp8_block_fp32", marks=pytest.mark.extended),
        pytest.param("mxfp4", marks=pytest.mark.extended),
        pytest.param("nvfp4_rows", marks=pytest.mark.extended),
        pytest.param("int4_g128", marks=pytest.mark.extended),
    ],
)
def test_wires_and_layouts_agree_where_shards_cut_blocks(format: str):
    """On 3 ranks, in both layouts, quantized bytes on the wire and bf16 give the same losses, and
    the same bytes on every rank.

    Buckets of one weight: 16,384 and 8,192 elements a rank, of which the latter cut rows of 96.
    """
    flags = ["--train-iters", "4", "--global-batch-size", "6", "--ddp-bucket-size", "20000"]
    flags += [*OVERLAP, "--eval-interval", NEVER, *(WIDE if format == "int4_g128" else [])]
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


@pytest.mark.parametrize(
    ("ranks", "overlap", "reshardable", "format"),
    [
        (2, OVERLAP, [], "mxfp8"),
        pytest.param(2, OVERLAP, [], "int4", marks=pytest.mark.extended),
        pytest.param(
            *(2, [], ["--dist-ckpt-optim-fully-reshardable"], "nvfp4_rows"),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            3,
            OVERLAP,
            ["--dist-ckpt-optim-fully-reshardable", "--ddp-bucket-size", "20000"],
            "mxfp8",
            marks=pytest.mark.extended,
        ),
    ],
    ids=[
        "dp_reshardable",
        "dp_reshardable, rows",
        "fully_reshardable, no overlap",
        "fully_reshardable, padded buckets",
    ],
)
def test_resume_continues_to_the_bit(
    ranks: int, overlap: list[str], reshardable: list[str], format: str, tmp_path: Path
):
    """A run that stops after 2 of 4 steps and loads its checkpoint ends as one that never did.

    Megatron 0.19 saves wrong states where buckets are padded: of all but the first bucket.
    """
    batch = ["--global-batch-size", "6"]  # for 2 ranks and for 3
    flags = [*STEPS, *batch, *overlap, *reshardable, "--eval-interval", "3"]
    config = MoEOptimConfig(format=format)
    whole = run_ranks(ranks, _train, flags, config)
    folder = str(tmp_path / "checkpoints")
    run_ranks(ranks, _train, [*flags, "--save", folder, "--exit-interval", "2"], config)
    rest = run_ranks(ranks, _train, [*flags, "--load", folder], config)
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
