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

pytestmark = [pytest.mark.slow, pytest.mark.extended]
FLAGS = ["--optimizer", "muon", "--train-iters", "3", "--eval-interval", "2"]
REFUSAL = (
    "ConfigError: moe_optim: --optimizer muon with step: stock: Megatron's own step calls "
    "emerging-optimizers, which cannot be imported. Set step: fused; or run pip install "
    "'moe_optim[muon]'."
)
BUILD_AND_TRAIN = """
import os
import sys
from tests.support.hiding import hide
hide()
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import emerging_optimizers
from moe_optim.commands.train.pretrain import train
from moe_optim.config import MoEOptimConfig
from moe_optim.integration import cpu_runtime
from tests.support.training import MODEL, pretrain

assert emerging_optimizers.OrthogonalizedOptimizer is object
folder, *flags = sys.argv[1:]
cpu_runtime.install()
if os.fork() == 0:
    GPTModel.__init__ = lambda *_, **__: sys.exit("a model is built")
    chosen = ["--use-moe-grouped-optim", "--moe-optim-set", "format=mxfp8"]
    try:
        train([*MODEL, *flags, *chosen, "--moe-optim-set", "step=stock"])
    except Exception as error:
        torch.save(f"{type(error).__name__}: {error}", f"{folder}/said.pt")
    finally:
        os._exit(0)
os.wait()
record = pretrain(flags, MoEOptimConfig(format="mxfp8", step="fused"))
torch.save(record, f"{folder}/record.pt")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Record]:
    """Return what a rank that cannot import the package says of the stock step, and its run."""
    folder = tmp_path_factory.mktemp("found")
    environment = dict(os.environ) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MOE_OPTIM_CPU": "1"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD_AND_TRAIN, str(folder), *FLAGS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "said.pt"), torch.load(folder / "record.pt", weights_only=False)


def test_a_fused_step_does_not_need_it(found: tuple[str, Record]):
    """Losses, masters, momenta and weights are those of a run with it, to the bit."""
    _, got = found
    config = MoEOptimConfig(format="mxfp8", step="fused")
    (want,) = run_ranks(1, pretrain, FLAGS, config)
    assert len(want.losses) == 3
    assert_same_run(got, want, what="without emerging-optimizers")


def test_megatrons_step_is_refused_before_a_model_is_built(found: tuple[str, Record]):
    assert found[0] == REFUSAL
