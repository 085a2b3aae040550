"""slime and miles build this package's optimizer by their own functions, of their own flags.

``SLIME_PATH`` and ``MILES_PATH`` name their checkouts. What else they import, such as engines for
inference, is stood in for.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tools.upstream.stand_in_imports import standing_in

ROOT = Path(__file__).parents[2]
CHECKOUTS = {name: os.environ.get(f"{name.upper()}_PATH") for name in ("slime", "miles")}
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


def _set_up(launcher: str, checkout: str) -> tuple[str, bool, tuple[int, int]]:
    """Return the optimizer's class, whether its steps are fused, and how much is on the host."""
    from tests.support import training
    from tests.support.checkpoints.hf_models import build_model, install_runtime, start_megatron
    from tests.support.steps.host_states import share_at_home

    install_runtime()
    name = f"{launcher}.backends.megatron_utils.model"
    with standing_in(Path(checkout), launcher, [name], {}):
        module = importlib.import_module(name)
    sys.modules[name] = module  # as in its workers; what it imported is gone with the block
    sys.path.insert(0, str(ROOT / "examples"))
    importlib.import_module("slime_and_miles").install(None)
    args = start_megatron([*training.MODEL, *FLAGS.split(), *STARTED])
    vars(args).update(OWN_FLAGS)
    for name in ("is_lora_enabled", "is_multi_lora_enabled"):
        setattr(module, name, lambda _args: False)
    module.get_model_provider_func = lambda *_: lambda **_kwargs: build_model(args)
    _, optimizer, _ = module.setup_model_and_optimizer(args)
    (part,) = optimizer.chained_optimizers
    part.make_moments()
    return type(part).__name__, optimizer.is_fused, share_at_home(optimizer)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not path, reason=f"{name.upper()}_PATH names no checkout"),
        )
        for name, path in CHECKOUTS.items()
    ],
)
def test_its_own_function_builds_our_optimizer_with_all_states_on_the_host(launcher: str):
    """By the hook that its documents name, with the flags of its scripts for such models."""
    ((name, is_fused, (at_home, total)),) = run_ranks(1, _set_up, launcher, CHECKOUTS[launcher])
    assert name == "GroupedDistributedOptimizer"
    assert is_fused
    assert at_home == total > 0
