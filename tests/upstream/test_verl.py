"""verl's own functions build our optimizer, move quantized weights, gradients and states to the
host and back, and save and load checkpoints.

``VERL_PATH`` names its checkout. What else its module imports is stood in for.
"""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_optim
from moe_optim import MoEOptimConfig
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states import life_cycle, making_room
from tests.support.training_runs.small_steps import take_step, weights_of
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


FACTORY = "verl.utils.megatron.optimizer"
MANAGER = "verl.utils.checkpoint.megatron_checkpoint_manager"
REAL = (
    FACTORY,
    MANAGER,
    "verl.utils.checkpoint.checkpoint_manager",
    "verl.utils.device",
    "verl.utils.fs",
    "verl.utils.megatron.dist_checkpointing",
    "verl.utils.megatron_utils",
    "verl.utils.torch_dtypes",
)
"""Modules of verl that are not stood in for."""


def _start_verl(checkout: str, config: MoEOptimConfig | None) -> tuple[dict[str, Any], list[Any]]:
    """Return verl's modules and a model chunk; None for the configuration of the example."""
    from tests.support import training
    from tests.support.checkpoints.hf_models import build_model, install_runtime, start_megatron

    install_runtime()
    with standing_in(Path(checkout), "verl", REAL, {}):
        verl = {name: importlib.import_module(name) for name in REAL}
    sys.modules.update(verl)  # as in its workers, which import the example afterwards
    if config is None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
        importlib.import_module("verl_external_lib")
    else:
        moe_optim.install(config)
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model

    flags = ["--train-iters", "1", "--distributed-backend", "gloo"]
    flags += ["--no-check-for-nan-in-loss-and-grad"]  # which its own loop of passes does not reset
    args = start_megatron([*training.MODEL, *flags])
    return verl, get_model(lambda **_: build_model(args), ModelType.encoder_or_decoder)


def _make_optimizer(verl: dict[str, Any], model: list[Any]) -> Any:
    settings = verl[FACTORY].init_megatron_optim_config(OPTIMIZER)
    return verl[FACTORY].get_megatron_optimizer(model, settings)


def _build_by_verl(checkout: str) -> tuple[str, bool]:
    """Return the class of the optimizer, and whether our factory made the chain around it."""
    optimizer = _make_optimizer(*_start_verl(checkout, None))
    (part,) = optimizer.chained_optimizers
    return type(part).__name__, hasattr(optimizer, "health")


@pytest.mark.skipif(not CHECKOUT, reason="VERL_PATH names no checkout")
def test_its_own_function_builds_our_optimizer():
    """Where ``examples/verl_external_lib.py`` is imported."""
    (found,) = run_ranks(1, _build_by_verl, CHECKOUT)
    assert found == ("GroupedDistributedOptimizer", True)


def _train_and_keep(
    checkout: str, config: MoEOptimConfig, folder: str, by_name: bool, resumes: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two steps and save, or load; return the norms of two more steps, and the weights."""
    verl, model = _start_verl(checkout, config)
    optimizer = _make_optimizer(verl, model)
    for name in (MANAGER, "verl.utils.checkpoint.checkpoint_manager"):
        verl[name].get_device_name, verl[name].is_device_available = lambda: "cpu", lambda: False
    resharding = {
        "dist_ckpt_optim_fully_reshardable": by_name,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    manager = verl[MANAGER].MegatronCheckpointManager(
        config=SimpleNamespace(
            megatron=SimpleNamespace(**resharding), model=SimpleNamespace(path="none")
        ),
        checkpoint_config=_Settings(async_save=False, save_contents=None, load_contents=None),
        model_config=None,
        transformer_config=model[0].config,
        role="actor",
        model=model,
        arch="",
        hf_config=None,
        param_dtype=torch.bfloat16,
        share_embeddings_and_output_weights=False,
        processing_class=None,
        optimizer=optimizer,
        optimizer_scheduler=None,
        use_distributed_optimizer=True,
        use_dist_checkpointing=True,
    )
    if resumes:
        # Apart, as when the weights come from Hugging Face's files: loading a model empties its
        # entries, in which Megatron's optimizer then finds no parameter, nor does ours.
        for contents in (["model"], ["optimizer", "extra"]):
            manager.checkpoint_load_contents = contents
            manager.load_checkpoint(folder)
    else:
        for number in range(2):
            take_step(model[0], optimizer, number)
        manager.save_checkpoint(folder, global_step=2)
    norms = [take_step(model[0], optimizer, number) for number in (2, 3)]
    return norms, weights_of(model[0])


@pytest.mark.skipif(not CHECKOUT, reason="VERL_PATH names no checkout")
@pytest.mark.parametrize("by_name", [False, True], ids=["by rank", "by name"])
@pytest.mark.parametrize(
    "config",
    [MoEOptimConfig(format="bf16"), MoEOptimConfig(format="mxfp8", offload_states=0.5)],
    ids=["bf16", "mxfp8, half of the states on the host"],
)
def test_its_checkpoint_manager_resumes_to_the_bit(config, by_name, tmp_path):
    """On two ranks. It saves weights, states and random streams as three checkpoints."""
    arguments = CHECKOUT, config, str(tmp_path), by_name
    kept = run_ranks(2, _train_and_keep, *arguments, False)
    resumed = run_ranks(2, _train_and_keep, *arguments, True)
    seals = sorted(path.parent.parent.name for path in tmp_path.glob("*/*/moe_optim.seal.json"))
    assert seals == ["extra", "model", "optimizer"]
    for (norms, weights), (same_norms, same_weights) in zip(kept, resumed, strict=True):
        assert norms == same_norms
        assert_same_tensors(same_weights, weights, what="weights")
