"""Calibration on a GPU: portable experts, and Transformer Engine's own classes in training."""

import shlex
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.megatron.te.quantizer import import_error
from tests.support.amax import amax_of
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import run_ranks
from tests.support.training import pretrain

pytestmark = pytest.mark.gpu
NEEDS_TE = pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine")

RUN = shlex.split("--train-iters 2 --eval-iters 0 --eval-interval 1000000 --seq-length 128")
RUN += shlex.split("--max-position-embeddings 128 --hidden-size 256 --ffn-hidden-size 256")
RUN += shlex.split(
    "--moe-ffn-hidden-size 256 --overlap-grad-reduce --overlap-param-gather --lr 0.1"
)
THEIRS = shlex.split("--transformer-impl transformer_engine")
BLOCKS = [*THEIRS, *shlex.split("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather")]

Amaxes = dict[str, torch.Tensor]


def _values(weight: Any) -> torch.Tensor:
    """Return what a weight dequantizes to by the code of its own class."""
    if hasattr(weight, "quantized_storage") or type(weight) is not torch.nn.Parameter:
        return weight.dequantize()
    return weight


def _oracle(chunks: list[Any]) -> Amaxes:
    """Return the amaxes of experts' weights by linear, in plain torch on the CPU."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, weight in chunks[0].named_parameters():
        linear, _, leaf = name.rpartition(".")
        if ".experts." in name and leaf.startswith("weight"):
            values = _values(weight).detach().cpu()
            parts.setdefault(linear, []).append(values if values.dim() == 3 else values[None])
    return {linear: amax_of(torch.cat(values)).view(-1, 1, 1) for linear, values in parts.items()}


def _found(chunks: list[Any]) -> Amaxes:
    import moe_optim

    moe_optim.calibrate(chunks)
    amaxes = {name: moe_optim.calibrated_amax(m) for name, m in chunks[0].named_modules()}
    assert all(amax.is_cuda for amax in amaxes.values() if amax is not None)
    return {name: amax.cpu() for name, amax in amaxes.items() if amax is not None}


def _calibrate(flags: list[str], format: str) -> list[tuple[Amaxes, Amaxes]]:
    """Calibrate before the first step and after the last; return what is found, and the oracle."""
    pairs = []

    def compare(chunks: list[Any], _: Any) -> None:
        pairs.append((_found(chunks), _oracle(chunks)))

    config = MoEOptimConfig(format=format)
    pretrain([*RUN, *flags], config, after_setup=compare, observe=compare)
    return pairs


@pytest.mark.parametrize(
    ("flags", "format"),
    [
        pytest.param([], "bf16", id="portable bf16"),
        pytest.param([], "mxfp8", id="portable MXFP8"),
        pytest.param([], "nvfp4", id="portable NVFP4"),
        pytest.param(THEIRS, "bf16", id="Transformer Engine bf16", marks=NEEDS_TE),
        pytest.param(BLOCKS, "fp8_block", id="Transformer Engine FP8 blocks", marks=NEEDS_TE),
    ],
)
def test_amaxes_are_plain_torchs_before_and_after_training(flags: list[str], format: str):
    """Of what the weights' own classes dequantize to; steps move them."""
    ((first, wanted), (last, wanted_last)) = run_ranks(1, _calibrate, flags, format)[0]
    assert len(first) == 4  # two layers of fc1 and fc2
    for found, want in ((first, wanted), (last, wanted_last)):
        assert found.keys() == want.keys()
        for name, amax in want.items():
            assert_bytes_equal(found[name], amax, what=name)
    assert any(not torch.equal(last[name], amax) for name, amax in first.items())
