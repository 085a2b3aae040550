"""The results of a run say what happened, over resumes, and are whole or absent."""

import json

import pytest

from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.commands.train.summary import (
    write_summary,
)
from tests.support.training_runs.runs import write_events

TRAIN, VALIDATION = "lm loss", "lm loss validation"
MODEL = {
    "optimizer": "GroupedDistributedOptimizer",
    "format": "mxfp8",
    "parameters": 1000,
    "quantized_parameters": 750,
    "rank0": {"buckets": 4, "step": "stock"},
}


def losses(first, last, offset=0.0):
    return [(iteration, 4.0 / iteration + offset) for iteration in range(first, last + 1)]


@pytest.fixture
def facts(tmp_path):
    log = tmp_path / "stdout.log"
    lines = [" validation loss at iteration 40 on validation set | lm loss value: 9.0E+00 | x |"]
    lines += [" validation loss at iteration 40 on test set | lm loss value: 2.500000E+00 | x |"]
    log.write_text("\n".join(lines))
    return {
        "world_size": 2,
        "seconds": 30.0,
        "command": "moe-optim train quickstart.yaml",
        "resumed_from": None,
        "byte_entropy": 3.4,
        "last_log": log,
    }


def finished_run(path):
    folder = RunFolder(path)
    folder.path.mkdir(exist_ok=True)
    folder.model.write_text(json.dumps(MODEL))
    write_events(folder.tensorboard, {TRAIN: losses(1, 40), VALIDATION: losses(10, 40)[::10]}, 100)
    return folder


def test_the_summary_has_every_promised_key(tmp_path, facts):
    folder = finished_run(tmp_path)
    summary = write_summary(folder, **facts)
    assert summary == json.loads(folder.summary.read_text())
    assert summary == {
        **MODEL,
        "world_size": 2,
        "iterations": 40,
        "loss_first": 4.0,
        "loss_last": pytest.approx(0.1),
        "validation_losses": pytest.approx([0.4, 0.2, 4 / 30, 0.1]),
        "validation_iterations": [10, 20, 30, 40],
        "test_loss": 2.5,
        "byte_entropy": 3.4,
        "seconds": 30.0,
        "iterations_per_second": pytest.approx(1.0),
        "resumed_from": None,
        "command": "moe-optim train quickstart.yaml",
    }
