"""Training with quantized experts through Megatron's own loop: what must hold to the bit."""

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
    assert_same_tensors,
    pretrain,
    weight_bytes,
)

pytestmark = pytest.mark.slow

MXFP8 = MoEOptimConfig(format="mxfp8")
STEPS = ["--train-iters", "2"]
NEVER = "1000000"
WIDE = ["--hidden-size", "128", "--moe-ffn-hidden-size", "128"]


def _train(flags: list[str], config: MoEOptimConfig) -> Record:
    return pretrain(flags, config, observe=assert_weights_come_from_masters)


@pytest.mark.parametrize(
    "format",
    [
        "nvfp4",
        pytest.param("int4", marks=pytest.mark.extended),
        pytest.param("mxfp8", marks=pytest.mark.extended),
        pytest.param("fp8_block", marks=pytest.mark.extended),
        pytest.param("int4_g128", marks=pytest.mark.extended),
    ],
)
def test_wires_and_layouts_agree_where_shards_cut_blocks(format: str):
    """On 3 ranks, in both layouts, quantized bytes on the wire and bf16 give the same losses, and
    the same bytes on every rank.

    Buckets of one weight: 16,384 and 8,192 elements a rank, of which the latter cut rows of 96.
    """
    flags = ["--train-iters", "3", "--global-batch-size", "6", "--ddp-bucket-size", "20000"]
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
