"""``moe-optim train`` where no rank has both tokens and losses: two pipeline stages."""

import json
import math
import shutil

import pytest

from moe_optim.commands.cli import main as cli
from moe_optim.commands.train.resume import checkpoint_defect
from tests.support.training_runs.runs import REPOSITORY

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_two_pipeline_stages_train_to_the_summary(tmp_path):
    """Losses come from the last stage, the account of the model from all; both stages save."""
    shutil.copytree(REPOSITORY / "moe_optim" / "commands" / "cli", tmp_path / "text")
    out = tmp_path / "run"
    recipe = REPOSITORY / "recipes" / "quickstart.yaml"
    words = ["train", str(recipe), "--out", str(out), "--cpu", "--ranks", "2"]
    words += ["--text", str(tmp_path / "text"), "--", "--pipeline-model-parallel-size", "2"]
    words += ["--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1"]
    assert cli.main([*words, "--lr-warmup-iters", "0", "--save-interval", "2"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["iterations"] == 2
    for loss in (summary["loss_first"], *summary["validation_losses"], summary["test_loss"]):
        assert 0 < loss < 1.2 * math.log(384)  # 257 tokens, padded to 384 by Megatron
    assert summary["quantized_parameters"] == 2 * 8 * 3 * 128 * 256  # layers, experts, gate up down
    assert summary["parameters"] > summary["quantized_parameters"]
    assert checkpoint_defect(out / "checkpoints" / "iter_0000002") is None
