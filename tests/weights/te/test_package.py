"""Portable experts in the tensor classes of Transformer Engine, wherever it can be imported.

``TRANSFORMER_ENGINE_PATH`` lists folders with it, apart from what Python finds by itself: on a CPU
Megatron must not find it, since its Adam needs a GPU. Its libraries come from ``LD_LIBRARY_PATH``.
Nothing of it is launched, so its classes are held on any machine. Seen with 2.20.2.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moe_optim import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_run, pretrain
from tools.upstream.engine_version import FORMATS

PATH = [f for f in os.environ.get("TRANSFORMER_ENGINE_PATH", "").split(":") if f]
pytestmark = pytest.mark.skipif(
    not PATH, reason="TRANSFORMER_ENGINE_PATH names no Transformer Engine"
)

LAYOUTS = ("grouped", "indexed")
TRAIN = ["--train-iters", "4", "--eval-interval", "2"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


def _classes(model: list[Any], _optimizer: Any) -> set[str]:
    storages = [
        param.quantized_storage
        for chunk in model
        for param in chunk.parameters()
        if hasattr(param, "quantized_storage")
    ]
    return {type(getattr(storage, "_param", storage)).__name__ for storage in storages}


def _train(flags: Sequence[str], config: MoEOptimConfig) -> Record:
    """Train after Megatron has looked for Transformer Engine in vain; ``extra`` names classes."""
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    for name in cpu_runtime.GPU_PACKAGES:
        sys.modules.pop(name, None)
    sys.path += PATH
    return pretrain(flags, config, observe=_classes)


EXPECTED = {
    "mxfp8": "MXFP8Tensor",
    "mxfp8_2d": "MXFP8Tensor",
    "nvfp4": "NVFP4Tensor",
    "fp8_block": "Float8BlockwiseQTensor",
    "fp8_block_fp32": "Float8BlockwiseQTensor",
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("expert_layout", LAYOUTS)
def test_a_run_is_that_of_portable_weights(format, expert_layout):
    """Losses, masters, moments and every byte of two ranks, wire quantized and overlapped."""
    portable = MoEOptimConfig(format=format, expert_layout=expert_layout, record_amax=True)
    theirs = replace(portable, storage="transformer_engine")
    flags = [*TRAIN, *OVERLAP]
    want = run_ranks(2, _train, flags, portable)
    got = run_ranks(2, _train, flags, theirs)
    for ours, theirs in zip(want, got, strict=True):
        kind = "GroupedTensor" if expert_layout == "grouped" else EXPECTED[format]
        assert theirs.extra == {kind} and ours.extra == {"PortableStorage"}
        assert_same_run(theirs, ours, what=f"{format} {expert_layout}")


@pytest.mark.parametrize("format", FORMATS)
def test_checkpoints_go_from_one_kind_of_storage_to_the_other(format, tmp_path):
    """Saved by groups of Transformer Engine's after two steps and loaded into portable experts, one
    a parameter, and the other way round: both runs go on as if nothing had been saved."""
    grouped = MoEOptimConfig(format=format, storage="transformer_engine")
    indexed = MoEOptimConfig(format=format, expert_layout="indexed")
    saving = ["--dist-ckpt-optim-fully-reshardable", "--save-interval", "2"]
    for number, (first, second) in enumerate([(grouped, indexed), (indexed, grouped)]):
        folder = str(tmp_path / str(number))
        whole = run_ranks(2, _train, [*TRAIN, *saving, "--save", f"{folder}-whole"], first)
        run_ranks(2, _train, [*TRAIN, *saving, "--save", folder, "--exit-interval", "2"], first)
        rest = run_ranks(2, _train, [*TRAIN, *saving, "--load", folder], second)
        for before, after in zip(whole, rest, strict=True):
            assert after.losses == {step: before.losses[step] for step in (3, 4)}
