"""Muon where emerging-optimizers is not installed, which Megatron's own step calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_run, pretrain

FLAGS = ["--optimizer", "muon", "--train-iters", "3", "--eval-interval", "2"]
REFUSAL = (
    "ConfigError: moe_optim: --optimizer muon with step: stock: Megatron's own step calls "
    "emerging-optimizers, which cannot be imported. Set step: fused; or run pip install "
    "'moe_optim[muon]'."
)
TRAIN = """
import sys
from tests.support.hiding import hide
hide()
import torch
from megatron.core.optimizer import emerging_optimizers
from moe_optim.config import MoEOptimConfig
from tests.support.training import pretrain

assert emerging_optimizers.OrthogonalizedOptimizer is object
step, result, *flags = sys.argv[1:]
torch.save(pretrain(flags, MoEOptimConfig(format="mxfp8", step=step)), result)
"""
BUILD = """
import sys
from tests.support.hiding import hide
hide()
from megatron.core.models.gpt import GPTModel
from moe_optim.commands.train.pretrain import train
from moe_optim.integration import cpu_runtime
from tests.support.training import MODEL

cpu_runtime.install()
GPTModel.__init__ = lambda *_, **__: sys.exit("a model is built")
flags = ["--use-moe-grouped-optim", "--moe-optim-set", "format=mxfp8"]
try:
    train([*MODEL, *sys.argv[2:], *flags, "--moe-optim-set", "step=" + sys.argv[1]])
except Exception as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
"""


def _run(script: str, *words: str | Path) -> str:
    """Run a script on one rank that cannot import the package; return what it tells."""
    environment = dict(os.environ) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MOE_OPTIM_CPU": "1"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words), *FLAGS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


@pytest.mark.slow
def test_a_fused_step_does_not_need_it(tmp_path: Path):
    """Losses, masters, momenta and weights are those of a run with it, to the bit."""
    result = tmp_path / "result.pt"
    told = _run(TRAIN, "fused", result)
    assert result.exists(), told
    got: Record = torch.load(result, weights_only=False)
    config = MoEOptimConfig(format="mxfp8", step="fused")
    (want,) = run_ranks(1, pretrain, FLAGS, config)
    assert len(want.losses) == 3
    assert_same_run(got, want, what="without emerging-optimizers")


def test_megatrons_step_is_refused_before_a_model_is_built():
    assert _run(BUILD, "stock").strip().splitlines()[-1] == REFUSAL
