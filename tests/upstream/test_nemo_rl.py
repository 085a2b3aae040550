"""NeMo-RL's own functions build our optimizer, make room for an engine, and gather its weights.

``NEMO_RL_PATH`` names its checkout, and ``MEGATRON_BRIDGE_PATH`` what it imports, as in
``tests/integration/test_bridge_package.py``. Ray and all else is stood in for.
"""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.test_bridge_package import find_packages_on_a_cpu
from tests.support.ranks import run_ranks
from tools.stacks.bridge_recipes import RECIPES, SEQUENCE, read_recipe
from tools.stacks.stand_ins import STAND_INS
from tools.upstream.stand_in_imports import StandIn, find_bridge, stand_in_for, standing_in

CHECKOUT = os.environ.get("NEMO_RL_PATH", "")
pytestmark = [
    pytest.mark.skipif(not (CHECKOUT and find_bridge()), reason="NEMO_RL_PATH is not set"),
    pytest.mark.skipif(
        pytest.importorskip("megatron.core").__version__ >= "0.20",
        reason="needs releases of megatron-core and Megatron-Bridge",
    ),
]
SETUP = "nemo_rl.models.megatron.setup"
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
OWN = (SETUP, WORKER, REGISTRY, "nemo_rl.modelopt.registry", "nemo_rl.models.megatron.config")
ROOT = Path(__file__).parents[2]
RECIPE = RECIPES["Qwen3-30B-A3B"]
POLICY = {"megatron_cfg": {"freeze_moe_router": False}}


class _Generic(StandIn):
    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Decorator(StandIn):
    def __new__(cls, *_: Any, **__: Any) -> Any:
        return lambda decorated: decorated


BASES = {"BatchedDataDict": _Generic, "wrap_with_nvtx_name": _Decorator, "remote": _Decorator}


def _import_nemo_rl(checkout: str) -> tuple[Any, Any]:
    """Return its module that builds a model, and the worker class of the example."""
    find_packages_on_a_cpu()
    stand_in_for(STAND_INS["nemo_rl"], BASES)
    for name in ("training.pretrain", "training.gpt_step"):  # without stand-ins for what it lacks
        importlib.import_module(f"megatron.bridge.{name}")
    adapters: Any = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    if not hasattr(adapters, "FullyShardedDataParallelV1"):  # of 0.20, which its worker imports
        for version in ("V1", "V2"):
            wrapper = adapters.FullyShardedDataParallel
            setattr(adapters, f"FullyShardedDataParallel{version}", wrapper)
    sys.path.insert(0, str(ROOT / "examples"))
    with standing_in(Path(checkout), "nemo_rl", OWN, BASES):
        setup: Any = importlib.import_module(SETUP)
        worker = importlib.import_module("nemo_rl_worker").MoEOptimPolicyWorker
        importlib.import_module(REGISTRY).get_actor_python_env(
            "nemo_rl_worker.MoEOptimPolicyWorker"
        )
    sys.modules[SETUP] = setup  # as in its workers
    setup.get_attached_draft_model = lambda model: None
    return setup, worker


def _build(setup: Any, folder: Path, load: str | None = None) -> Any:
    config = read_recipe(RECIPE, 1, folder, 4)
    config.checkpoint.load = load
    config.model.moe_grouped_gemm, config.model.vocab_size = True, 256
    importlib.import_module("megatron.bridge.training.config").runtime_config_update(config)
    return setup.setup_model_and_optimizer(POLICY, config)


def _step(built: Any, seed: int) -> float:
    from megatron.core.distributed import finalize_model_grads

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 255, (2, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE)[None].expand(2, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    built.model.zero_grad_buffer()
    built.optimizer.zero_grad()
    loss = built.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([built.model])
    built.optimizer.step()
    return float(loss)


def _masters(optimizer: Any) -> list[torch.Tensor]:
    """Return copies of the fp32 masters of all parts of a chain."""
    return [
        master.clone()
        for part in optimizer.chained_optimizers
        for group in part.shard_fp32_from_float16_groups
        for master in group
    ]


def _roll_out(checkout: str, folder: Path, makes_room: bool) -> dict[str, Any]:
    """Train, hand weights over, make room for an engine in its worker's way, and train on."""
    setup, worker = _import_nemo_rl(checkout)
    import moe_optim

    moe_optim.install(moe_optim.MoEOptimConfig(format="mxfp8_2d", expert_layout="indexed"))
    built = _build(setup, folder)
    losses = [_step(built, seed) for seed in range(2)]
    model = built.model
    model.disable_forward_pre_hook()  # as its worker does before it reads weights
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_config(RECIPE.hf_config())
    handed = {
        name: tensor.clone()
        for name, tensor in bridge.export_hf_weights([model], cpu=True, show_progress=False)
    }
    if makes_room:
        one = SimpleNamespace(optimizer=built.optimizer)
        for device in ("cpu", "cuda"):
            worker.move_model(one, model, device)
            worker.move_optimizer(one, device)
    model.enable_forward_pre_hook()
    losses += [_step(built, seed) for seed in range(2, 4)]
    return {
        "classes": {type(part).__name__ for part in built.optimizer.chained_optimizers},
        "is ours": hasattr(built.optimizer, "health"),
        "losses": losses,
        "experts": {name: value for name, value in handed.items() if ".mlp.experts." in name},
        "masters": _masters(built.optimizer),
    }


def _train_and_keep(
    checkout: str, folder: Path, resumes: bool
) -> tuple[list[float], list[torch.Tensor]]:
    """Train two steps and save by its worker, or load; return losses and masters of two more."""
    setup, worker = _import_nemo_rl(checkout)
    import moe_optim

    moe_optim.install(moe_optim.MoEOptimConfig(format="mxfp8_2d", expert_layout="indexed"))
    saved = str(folder / "saved")
    built = _build(setup, folder, saved if resumes else None)
    if not resumes:
        for seed in range(2):
            _step(built, seed)
        one = object.__new__(worker)  # without the rest of a policy
        one.cfg, one.mcore_state, one.megatron_cfg = {}, built.state, built.state.cfg
        one.model, one.optimizer, one.scheduler = built.model, built.optimizer, built.scheduler
        one.checkpointing_context = built.checkpointing_context
        one.optimizer_cpu_offload, one.should_disable_forward_pre_hook = False, True
        one.save_checkpoint(saved, optimizer_path=saved)
    losses = [_step(built, seed) for seed in (2, 3)]
    return losses, _masters(built.optimizer)


def test_training_goes_on_to_the_bit_around_its_rollouts(tmp_path):
    """With the optimizer of a plain configuration, as NeMo-RL makes it, and quantized experts."""
    (stayed,), (moved,) = (
        run_ranks(1, _roll_out, CHECKOUT, tmp_path / str(moves), moves, timeout_s=600)
        for moves in (False, True)
    )
    assert stayed["is ours"]
    assert stayed["classes"] == {"GroupedDistributedOptimizer"}
    assert len(stayed["experts"]) == 24
    assert moved["losses"] == stayed["losses"]
    assert all(map(torch.equal, moved["masters"], stayed["masters"]))
    for name, value in stayed["experts"].items():
        assert torch.equal(moved["experts"][name], value)


def test_what_its_worker_saves_resumes_to_the_bit(tmp_path):
    """Quantized experts, loaded where it sets up a policy."""
    (kept,), (resumed,) = (
        run_ranks(1, _train_and_keep, CHECKOUT, tmp_path, resumes, timeout_s=600)
        for resumes in (False, True)
    )
    assert resumed[0] == kept[0]
    assert len(resumed[1]) == len(kept[1]) > 0
    assert all(map(torch.equal, resumed[1], kept[1]))
