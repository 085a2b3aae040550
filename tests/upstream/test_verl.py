"""verl's own functions build our optimizer, and move quantized weights, gradients and states to the
host and back.

``VERL_PATH`` names its checkout. What else its module imports is stood in for.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.states import life_cycle, making_room
from tools.upstream.stand_in_imports import standing_in

CHECKOUT = os.environ.get("VERL_PATH", "")
TRAIN = [("zero", {}), ("micro", {"seed": 1, "last": True}), ("step", {})]


def _import_verl(checkout: str) -> Any:
    name = "verl.utils.megatron_utils"
    with standing_in(Path(checkout), "verl", [name], {}):
        verl = importlib.import_module(name)
    verl.get_device_id = torch.cuda.current_device
    verl.get_torch_device = lambda: torch.cuda
    verl._clear_te_fp8_weight_workspaces = lambda _: 0
    return verl


def _train_between_rollouts(checkout: str, knobs: dict[str, Any]) -> int:
    """Train, make room, train on; the life cycle compares everything to plain torch."""
    life_cycle.initialize()
    verl = _import_verl(checkout)
    making_room.send_away_as_verl = verl.offload_megatron_model_to_cpu
    making_room.bring_back_as_verl = verl.load_megatron_model_to_gpu
    cycle = life_cycle.LifeCycle(**knobs)
    for _ in range(2):
        for name, arguments in TRAIN:
            getattr(cycle, name)(**arguments)
            cycle.check()
        cycle.send_all_away()
        verl.offload_megatron_optimizer(cycle.optimizer)
        verl.load_megatron_optimizer(cycle.optimizer)
        cycle.bring_back()
        cycle.check()
    return len(making_room.managed_buffers([cycle.ddp]))


@pytest.mark.skipif(not CHECKOUT, reason="VERL_PATH names no checkout")
@pytest.mark.parametrize(
    "knobs",
    [
        {"format": "mxfp8", "step": "fused"},
        {"format": "nvfp4", "step": "stock"},
        {"format": "fp8_block", "step": "fused", "wire": "bf16"},
        {"format": "mxfp8", "step": "fused", "offload_states": 0.5},
    ],
    ids=lambda knobs: " ".join(map(str, knobs.values())),
)
def test_training_goes_on_to_the_bit_around_its_rollouts(knobs):
    (managed,) = run_ranks(1, _train_between_rollouts, CHECKOUT, knobs)
    assert managed > 0


class _Settings(dict[str, Any]):
    """Settings that are read as items and as attributes, like verl's."""

    __getattr__ = dict.__getitem__


OPTIMIZER = _Settings(optimizer="adam", lr=1e-6, min_lr=0.0, clip_grad=1.0, weight_decay=0.01)


def _build_by_verl(checkout: str) -> tuple[str, bool]:
    """Return the class of the optimizer, and whether our factory made the chain around it."""
    from tests.support import training
    from tests.support.checkpoints.hf_models import build_model, install_runtime, start_megatron

    install_runtime()
    names = ["verl.utils.megatron.optimizer", "verl.utils.torch_dtypes"]
    with standing_in(Path(checkout), "verl", names, {}):
        verl, _ = map(importlib.import_module, names)
    sys.modules[names[0]] = verl  # as in its workers, which import the example afterwards
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    importlib.import_module("verl_external_lib")
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model

    args = start_megatron([*training.MODEL, "--train-iters", "1", "--distributed-backend", "gloo"])
    model = get_model(lambda **_: build_model(args), ModelType.encoder_or_decoder)
    settings = verl.init_megatron_optim_config(OPTIMIZER)
    optimizer = verl.get_megatron_optimizer(model, settings)
    (part,) = optimizer.chained_optimizers
    return type(part).__name__, hasattr(optimizer, "health")


@pytest.mark.skipif(not CHECKOUT, reason="VERL_PATH names no checkout")
def test_its_own_function_builds_our_optimizer():
    """Where ``examples/verl_external_lib.py`` is imported."""
    (found,) = run_ranks(1, _build_by_verl, CHECKOUT)
    assert found == ("GroupedDistributedOptimizer", True)
