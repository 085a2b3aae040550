"""Run folders to report on, written by the product's own writers and torch's."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from moe_optim.formats.health_figures import ExpertLoad, LayerHealth
from moe_optim.health import writers
from tests.support.inputs import normal_weights
from tests.support.training_runs.health import measure

Scalars = Mapping[str, Sequence[tuple[int, float]]]

LOSSES = {
    "lm loss": [(iteration, 4.0 / iteration) for iteration in range(1, 41)],
    "lm loss validation": [(20, 0.25), (40, 0.125)],
    "grad-norm": [(iteration, 1.0 + iteration % 3) for iteration in range(1, 41)],
}
TIMES = {
    "iteration-time": [(1, 0.4), (2, 0.2), (3, 0.3)],
    "forward-backward-time": [(1, 0.25), (2, 0.15)],
}
MODEL = {
    "optimizer": "GroupedDistributedOptimizer",
    "format": "nvfp4",
    "parameters": 2000,
    "quantized_parameters": 1500,
    "rank0": {
        "step": "fused",
        "gathered_bytes": 2**20,
        "other_gathered_bytes": 2**19,
        "weights": [{"weight_bytes": 3 * 2**20}, {"weight_bytes": 2**20}],
    },
    "environment": {
        "versions": {"torch": "2.11.0", "megatron-core": "0.19.2"},
        "commit": "abc1234",
        "device": "NVIDIA H100",
    },
}
SUMMARY = {
    "byte_entropy": 3.4,
    "test_loss": 0.2,
    "iterations_per_second": 2.5,
    "seconds": 30.0,
    "world_size": 2,
    "resumed_from": None,
    "command": "moe-optim train quickstart --out <runs>",
}


def look_at(layers: int = 2, experts: int = 4, factor: float = 1.0) -> list[LayerHealth]:
    """Return the health of seeded experts whose masters are ``factor`` times what was quantized."""
    from moe_optim.formats import NVFP4

    looks = []
    for layer in range(layers):
        for number, linear in enumerate(("fc1", "fc2")):
            master = normal_weights(experts, 32, 64, seed=10 * layer + number)
            sums, amaxes = measure(NVFP4, [master])
            looks.append(
                LayerHealth(
                    layer=f"layers.{layer}.{linear}",
                    format=NVFP4.name,
                    experts=tuple(range(experts)),
                    amax=amaxes.double() * factor,
                    sums=sums,
                )
            )
    return looks


def loads_at(layers: int = 2, experts: int = 4) -> list[ExpertLoad]:
    """Return how many tokens the experts of each layer had: the last five times the others'."""
    return [
        ExpertLoad(
            layer=f"layers.{layer}.experts",
            experts=tuple(range(experts)),
            tokens=torch.tensor([*[50.0] * (experts - 1), 250.0]).double(),
        )
        for layer in range(layers)
    ]


def write_run(
    path: Path,
    scalars: Scalars = LOSSES | TIMES,
    *,
    looks: Mapping[int, Sequence[LayerHealth | ExpertLoad]] | None = None,
    model: Mapping[str, Any] | None = MODEL,
    summary: Mapping[str, Any] | None = SUMMARY,
    start: float = 1000.0,
) -> Path:
    """Write a run folder as one launch leaves it, beside earlier ones; return ``path``.

    Args:
        path: created.
        scalars: tag -> iteration and value.
        looks: iteration -> what health found.
        model: ``model.json``, or None for none.
        summary: ``summary.json``, or None for a run that has not finished.
        start: when the launch began, in seconds; an iteration takes one.
    """
    from torch.utils.tensorboard import SummaryWriter

    path.mkdir(parents=True, exist_ok=True)
    writer = SummaryWriter(str(path / "tensorboard"))
    for tag, points in scalars.items():
        for iteration, value in points:
            writer.add_scalar(tag, value, iteration, walltime=start + iteration)
    writer.add_text("moe_optim_recipe", "quickstart.yaml")
    megatron = SimpleNamespace(
        get_tensorboard_writer=lambda: writer, get_wandb_writer=lambda: None, _GLOBAL_ARGS=None
    )
    with patch.dict(sys.modules, {"megatron.training.global_vars": megatron}):  # type: ignore[dict-item]
        for iteration, health in (looks or {}).items():
            writers.write(health, iteration)
    writer.close()
    for name, content in (("model", model), ("summary", summary)):
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path
