"""slime and miles build this package's optimizer, save, load and hand experts over, by their own
functions, of their own flags.

``SLIME_PATH`` and ``MILES_PATH`` name their checkouts. What else they import, such as engines for
inference, is stood in for.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.training_runs.small_steps import take_step, weights_of
from tests.upstream.conftest import CHECKOUTS
from tools.upstream.stand_in_imports import standing_in

ROOT = Path(__file__).parents[2]
FLAGS = "--use-precision-aware-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
OWN_FLAGS = {
    "enable_gloo_process_groups": True,
    "use_stateless_adam": False,
    "debug_disable_optimizer": False,
    "stream_optimizer_state_to_disk": False,
    "num_rollout": 1,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 1,
    "num_steps_per_rollout": 1,
}
"""Of slime's and miles' parsers, which are not asked, and of the Megatron that they pin."""
STARTED = ["--load", "nowhere", "--train-iters", "1", "--distributed-backend", "gloo"]


PARTS = ("model", "checkpoint", "misc_utils", "megatron_to_hf", *(f"update_weight.{x}" for x in (
    "common", "hf_weight_iterator_base", "hf_weight_iterator_direct",
)))  # fmt: skip
"""Modules that are their own, and not stood in for."""


def _build(
    launcher: str,
    checkout: str,
    flags: Sequence[str],
    install: Callable[[Any], None],
    load: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return what its function sets up, and its modules by the last part of their names.

    With ``load``, its function for that reads this folder.
    """
    from tests.support import training
    from tests.support.checkpoints.hf_models import build_model, install_runtime, start_megatron

    install_runtime()
    package = f"{launcher}.backends.megatron_utils"
    names = [*(f"{package}.{part}" for part in PARTS), f"{launcher}.utils.types"]
    with standing_in(Path(checkout), launcher, names, {}):
        found = {name: importlib.import_module(name) for name in names}
    # as in its workers; what they imported is gone with the block
    sys.modules |= found | {launcher: ModuleType(launcher)}
    modules = {name.rpartition(".")[2]: module for name, module in found.items()}
    model = modules["model"]
    sys.modules[f"{package}.lora_utils"] = SimpleNamespace(_is_adapter_param_name=lambda _: False)
    install(None)
    args = start_megatron([*training.MODEL, *flags, *STARTED])
    vars(args).update(OWN_FLAGS)
    for name in ("is_lora_enabled", "is_multi_lora_enabled"):
        setattr(model, name, lambda _args: False)
    model.get_model_provider_func = lambda *_: lambda **_kwargs: build_model(args)
    if load is None:
        return (*model.setup_model_and_optimizer(args), args), modules
    for name in ("is_lora_model", "_critic_output_layer_needs_reinit"):
        setattr(model, name, lambda *_: False)
    model.clear_memory, args.load = lambda: None, load
    return (*model.initialize_model_and_optimizer(args)[:3], args), modules


def _set_up(launcher: str, checkout: str) -> tuple[str, bool, tuple[int, int]]:
    """Return the optimizer's class, whether its steps are fused, and how much is on the host."""
    from tests.support.steps.host_states import share_at_home

    sys.path.insert(0, str(ROOT / "examples"))
    example = importlib.import_module("slime_and_miles")
    (_, optimizer, *_), _ = _build(launcher, checkout, FLAGS.split(), example.install)
    (part,) = optimizer.chained_optimizers
    part.make_moments()
    return type(part).__name__, optimizer.is_fused, share_at_home(optimizer)


def _hand_over(launcher: str, checkout: str) -> tuple[int, list[str]]:
    """Return the number of expert tensors that its iterator makes, and those that differ."""
    import moe_optim

    config = moe_optim.MoEOptimConfig(format="bf16", expert_layout="indexed")
    (model, _, _, args), modules = _build(
        launcher, checkout, ["--qk-layernorm"], lambda _: moe_optim.install(config)
    )
    one = SimpleNamespace(size=1, rank=0, group=None)
    parallel = SimpleNamespace(pp=one, ep=one, tp=one, etp=one)
    for module in modules.values():
        vars(module).update(
            get_gloo_group=lambda: None,
            get_parallel_state=lambda: parallel,
            monkey_patch_torch_reductions=lambda: None,
            accelerator=SimpleNamespace(
                current_device=torch.cuda.current_device, synchronize=torch.cuda.synchronize
            ),
        )
    args.update_weight_buffer_size, args.q_lora_rank = 1 << 20, None
    iterator = modules["hf_weight_iterator_direct"].HfWeightIteratorDirect(
        args, model, model_name="qwen3moe", quantization_config=None
    )
    buckets = iterator.megatron_local_param_info_buckets
    for bucket in buckets:  # its converter knows norms of Transformer Engine's layers alone
        bucket[:] = [info for info in bucket if ".experts." in info.name]
    weights = dict(modules["common"].named_params_and_buffers(args, model))
    chunks = iterator.get_hf_weight_chunks(weights)
    made = {name: tensor for chunk in chunks for name, tensor in chunk}
    ours = dict(moe_optim.export_weights(model, layout="hf_per_expert"))
    expected = {name: tensor for name, tensor in ours.items() if ".experts." in name}
    names = made.keys() | expected.keys()
    return len(made), [name for name in names if not _are_equal(made.get(name), expected.get(name))]


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def test_its_own_function_builds_our_optimizer_with_all_states_on_the_host(launcher: str):
    """By the hook that its documents name, with the flags of its scripts for such models."""
    ((name, is_fused, (at_home, total)),) = run_ranks(1, _set_up, launcher, CHECKOUTS[launcher])
    assert name == "GroupedDistributedOptimizer"
    assert is_fused
    assert at_home == total > 0


def test_its_own_iterator_hands_over_the_experts_that_we_export(launcher: str):
    """Of weights that each hold one expert, in bf16: 2 layers of 4 experts, 3 matrices each."""
    ((made, differing),) = run_ranks(1, _hand_over, launcher, CHECKOUTS[launcher])
    assert made == 24
    assert differing == []


def _train_and_keep(
    launcher: str, checkout: str, folder: str, resumes: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two steps and save, or load; return the norms of two more steps, and the weights."""
    import moe_optim

    config = moe_optim.MoEOptimConfig(format="mxfp8", offload_states=0.5)
    flags = ["--save", folder, "--no-check-for-nan-in-loss-and-grad"]
    flags += ["--use-checkpoint-opt_param-scheduler"]
    (model, optimizer, scheduler, args), modules = _build(
        launcher,
        checkout,
        flags,
        lambda _: moe_optim.install(config),
        load=folder if resumes else None,
    )
    args.ci_test = False

    def step(number: int) -> float:
        norm = take_step(model[0], optimizer, number)
        scheduler.step(increment=args.global_batch_size)
        return norm

    if not resumes:
        modules["model"].is_lora_model = lambda _: False
        for number in range(2):
            step(number)
        modules["model"].save(2, model, optimizer, scheduler)
    norms = [step(number) for number in (2, 3)]
    return norms, weights_of(model[0])


def test_what_its_own_functions_save_resumes_to_the_bit(launcher: str, tmp_path):
    """On two ranks, with quantized experts and half of the states on the host."""
    kept, resumed = (
        run_ranks(2, _train_and_keep, launcher, CHECKOUTS[launcher], str(tmp_path), resumes)
        for resumes in (False, True)
    )
    for (norms, weights), (same_norms, same_weights) in zip(kept, resumed, strict=True):
        assert norms == same_norms
        assert_same_tensors(same_weights, weights, what="weights")
