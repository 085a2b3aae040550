"""The same with Megatron-Bridge itself, wherever it can be imported.

``MEGATRON_BRIDGE_PATH`` lists folders with it and all that it imports, which come first, since it
needs older versions of some packages. Transformer Engine need not be there. Seen with
megatron-bridge 0.6.2.
"""

import dataclasses
import os
import sys
from typing import Any

import pytest

from moe_optim.config import MoEOptimConfig
from moe_optim.integration import cpu_runtime
from tests.integration.test_bridge import FLAGS, NVFP4
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_run, pretrain
from tools.upstream.stand_in_imports import find_bridge

pytestmark = pytest.mark.skipif(
    find_bridge() is None, reason="MEGATRON_BRIDGE_PATH does not name Megatron-Bridge"
)


def find_packages_on_a_cpu() -> None:
    """Let this process train on the CPU and import packages of ``MEGATRON_BRIDGE_PATH``."""
    sys.path[:0] = os.environ["MEGATRON_BRIDGE_PATH"].split(":")
    for name in list(sys.modules):  # preloaded for all ranks, in other versions
        if name.partition(".")[0] in ("transformers", "huggingface_hub", "tokenizers"):
            del sys.modules[name]
    del sys.modules["transformer_engine"]  # hidden for all ranks; the runtime does so in its way
    cpu_runtime.install()


def _train(flags: list[str]) -> Record:
    """Train with its overrides, scheduler and ``setup_optimizer``; ``extra`` is what it built."""
    find_packages_on_a_cpu()
    from megatron.bridge.training.config import SchedulerConfig
    from megatron.bridge.training.optim import setup_optimizer
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training import training

    import moe_optim

    @dataclasses.dataclass
    class Container:
        optimizer: OptimizerConfig

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
    for ours, hand in zip(run_ranks(2, _train, FLAGS, timeout_s=600), by_hand, strict=True):
        assert ours.extra == ["GroupedChainedOptimizer", "OptimizerParamScheduler"]
        assert ours.classes == {"GroupedDistributedOptimizer"}
        assert_same_run(ours, hand, what="Megatron-Bridge")
