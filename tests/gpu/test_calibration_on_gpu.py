"""Calibration on a GPU: portable experts, and Transformer Engine's own classes in training."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_optim.weights.te.recipe import import_error
from tests.support.bytes import assert_same_tensors
from tests.support.gpu_sharing import places
from tests.support.training_runs.side_runs import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
NEEDS_TE = pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine")

THEIRS = shlex.split("--transformer-impl transformer_engine")
BLOCKS = [*THEIRS, *shlex.split("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather")]


def run(file: Path, format: str, flags: list[str]) -> None:
    """Train in a process of its own, which must succeed."""
    launch = "-m torch.distributed.run --standalone --nproc-per-node 1"
    command = [sys.executable, *shlex.split(launch), "-m", "tests.support.modules.calibrated_run"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command += [str(file), format, *flags]
    with places(1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


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
def test_amaxes_are_plain_torchs_before_and_after_training(
    flags: list[str], format: str, tmp_path: Path
):
    """Of what the weights' own classes dequantize to; steps move them."""
    run(tmp_path / "found.pt", format, flags)
    device, pairs = torch.load(tmp_path / "found.pt", weights_only=False)
    assert device == torch.cuda.get_device_name()
    (first, wanted), (last, wanted_last) = pairs
    assert len(first) == 4  # two layers of fc1 and fc2
    for found, want in ((first, wanted), (last, wanted_last)):
        assert_same_tensors(found, want)
    assert any(not torch.equal(last[name], amax) for name, amax in first.items())
