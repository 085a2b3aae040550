"""The command with nothing replaced: real text, real Megatron, two gloo ranks on the CPU."""

import json
import math
import shutil

import pytest

from moe_optim.checkpoint.integrity import checkpoint_defect
from moe_optim.commands.cli import main as cli
from moe_optim.environment import find_package
from tests.support.training_runs.runs import REPOSITORY

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

ITERATIONS = 4


def train(out):
    words = ["train", str(REPOSITORY / "recipes" / "quickstart.yaml"), "--out", str(out)]
    words += ["--cpu", "--text", str(out.parent / "text"), "--set", "moe_optim.health_interval=2"]
    megatron = ["--train-iters", str(ITERATIONS), "--eval-interval", "2", "--eval-iters", "1"]
    megatron += ["--lr-warmup-iters", "0", "--save-interval", "4", "--global-batch-size", "8"]
    return cli.main([*words, "--", *megatron])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """One short run that every test here looks at."""
    out = tmp_path_factory.mktemp("runs") / "short"
    shutil.copytree(REPOSITORY / "moe_optim" / "commands", out.parent / "text")
    assert train(out) == 0
    return out


def test_the_run_folder_tells_what_was_trained(run_folder):
    """The loss of an untrained model is that of knowing nothing."""
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["format"] == "mxfp8"
    assert summary["optimizer"] == "GroupedDistributedOptimizer"
    assert summary["world_size"] == 2
    assert 0 < summary["quantized_parameters"] < summary["parameters"]
    assert summary["iterations"] == ITERATIONS
    assert summary["validation_iterations"] == [2, 4]
    nothing = math.log(384)  # 257 tokens, padded to 384 by Megatron
    assert summary["loss_first"] == pytest.approx(nothing, rel=0.05)
    for loss in (summary["loss_last"], summary["test_loss"], *summary["validation_losses"]):
        assert 0 < loss < 1.2 * nothing
    assert 2 < summary["byte_entropy"] < 4
    assert summary["iterations_per_second"] > 0
    assert list((run_folder / "tensorboard").glob("events.out.tfevents.*"))
    assert len(list(run_folder.glob("logs/launch_*/attempt_0/[01]/stdout.log"))) == 2
    assert checkpoint_defect(run_folder / "checkpoints" / "iter_0000004") is None


def test_the_report_shows_what_was_trained_and_where(run_folder, capsys):
    assert cli.main(["report", str(run_folder)]) == 0
    assert str(run_folder / "report" / "index.html") in capsys.readouterr().out
    page = (run_folder / "report" / "index.html").read_text()
    core = f"megatron-core {find_package('megatron-core').version}"
    for text in ("layers.1.fc2", "Last sample, at iteration 4", core, "CPU, "):
        assert text in page
    assert (run_folder / "report" / "error.png").is_file()


def test_what_the_quickstart_leaves_converts_with_masters_and_moments(run_folder, capsys):
    saved, converted = str(run_folder / "checkpoints"), str(run_folder.parent / "hf")
    assert (
        cli.main(["convert", saved, converted, "--experts", "hf", "--format", "safetensors"]) == 0
    )
    assert "tensors of the optimizer" not in capsys.readouterr().out  # are left out
    assert cli.main(["verify", saved, converted]) == 0
    assert cli.main(["inspect", converted]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{row} " in said for row in ("weights", "param", "exp_avg", "exp_avg_sq"))


def test_what_the_quickstart_leaves_goes_on_to_transformers_and_to_engines(run_folder):
    saved, beside = str(run_folder), run_folder.parent
    assert cli.main(["convert", "--to", "hf", saved, str(beside / "whole")]) == 0
    assert cli.main(["export", "--format", "mxfp8", saved, str(beside / "mxfp8")]) == 0
    for folder in ("whole", "mxfp8"):
        config = json.loads((beside / folder / "config.json").read_text())
        assert config["architectures"] == ["Qwen3MoeForCausalLM"]
