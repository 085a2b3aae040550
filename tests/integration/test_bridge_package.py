"""The same with Megatron-Bridge itself, wherever it and Transformer Engine can be imported.

``MEGATRON_BRIDGE_PATH`` lists folders with both, apart from what Python finds by itself: on a CPU
Megatron must not find Transformer Engine, whose Adam needs a GPU. Its libraries come from
``LD_LIBRARY_PATH``. Seen with megatron-bridge 0.6.2 and Transformer Engine 2.20.2.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from tests.integration.test_bridge import FLAGS, NVFP4
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_run, pretrain

PATH = [folder for folder in os.environ.get("MEGATRON_BRIDGE_PATH", "").split(":") if folder]
FOUND = {
    name
    for name in ("megatron/bridge", "transformer_engine")
    if any(Path(folder, name).is_dir() for folder in PATH)
}
pytestmark = pytest.mark.skipif(
    len(FOUND) < 2,
    reason="MEGATRON_BRIDGE_PATH does not name Megatron-Bridge and Transformer Engine",
)


@contextmanager
def _findable() -> Iterator[None]:
    """Let Python find the package, after Megatron has looked for Transformer Engine in vain."""
    from moe_optim.integration import patches
    from moe_optim.integration.engine import apply_patches

    apply_patches(patches.ADAM)
    sys.path += PATH
    try:
        yield
    finally:
        del sys.path[-len(PATH) :]


def _train(flags: list[str]) -> Record:
    """Train with its overrides, scheduler and ``setup_optimizer``; ``extra`` is what it built."""
    with _findable():
        from megatron.bridge.training.config import SchedulerConfig
        from megatron.bridge.training.optim import setup_optimizer
        from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training import training

    import moe_optim
    from moe_optim.integration import cpu_runtime

    @dataclasses.dataclass
    class Container:
        optimizer: OptimizerConfig

    cpu_runtime.install()
    indexed = moe_optim.MoEOptimizerConfig(moe_optim=MoEOptimConfig(expert_layout="indexed"))
    overridden = Container(indexed)
    process_config_with_overrides(overridden, cli_overrides=["optimizer.moe_optim.format=nvfp4"])
    overridden.optimizer.finalize()
    built: list[str] = []

    def build(config: Any, model: list[Any], *_: Any, **__: Any) -> Any:
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
        ours = moe_optim.MoEOptimizerConfig(**values, moe_optim=overridden.optimizer.moe_optim)
        ours.finalize()
        steps = {"lr_decay_steps": 10, "lr_warmup_steps": 1, "wd_incr_steps": 10}
        decay = {"start_weight_decay": 0.1, "end_weight_decay": 0.1}
        schedule = SchedulerConfig()
        for name, value in {**steps, **decay}.items():
            setattr(schedule, name, value)
        optimizer, scheduler = setup_optimizer(ours, schedule, model, use_gloo_process_groups=True)
        built.extend(type(part).__name__ for part in (optimizer, scheduler))
        return optimizer

    training.get_megatron_optimizer = build
    return pretrain(flags, None, observe=lambda *_: built)


def test_its_setup_optimizer_trains_as_install_by_hand():
    """The knob it overrides is the one that is installed; losses, masters, moments and bytes of
    two ranks are equal to the bit."""
    by_hand = run_ranks(2, pretrain, FLAGS, NVFP4)
    for ours, hand in zip(run_ranks(2, _train, FLAGS), by_hand, strict=True):
        assert ours.extra == ["GroupedChainedOptimizer", "OptimizerParamScheduler"]
        assert ours.classes == {"GroupedDistributedOptimizer"}
        assert_same_run(ours, hand, what="Megatron-Bridge")
