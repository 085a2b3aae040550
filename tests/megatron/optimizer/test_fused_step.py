"""A fused step is one of Adam on every shard, with one norm over all gradients, to the bit."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.support.fused_steps import Run, assert_steps_follow, watch_run
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

CLIP_GRAD = 0.5
RUN = ["--train-iters", "3", "--eval-interval", "1000000", "--clip-grad", f"{CLIP_GRAD}"]
TP2 = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
COPIED_EXPERTS = ["--expert-tensor-parallel-size", "1"]
EP2 = ["--expert-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
MTP = ["--mtp-num-layers", "1"]
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
EXPERT_FLAGS = shlex.split("--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm")
EXPERT_FLAGS += shlex.split("--moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall")
ZEROS = ["--log-num-zeros-in-grad"]
extended = pytest.mark.extended


def couple_decay() -> None:
    """Have Adam add weight decay to gradients; no flag of Megatron does."""
    from megatron.training import training as megatron_training

    stock = megatron_training.get_megatron_optimizer_config

    def coupled(args: Any) -> Any:
        config, overrides = stock(args)
        config.decoupled_weight_decay = False
        return config, overrides

    megatron_training.get_megatron_optimizer_config = coupled


def keep_routers_in_fp32() -> None:
    """Have routers keep fp32 weights in a bf16 model."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import training as megatron_training

    stock = megatron_training.Float16Module

    def convert(*args: Any) -> torch.nn.Module:
        module = stock(*args)
        for router in (m for m in module.modules() if isinstance(m, TopKRouter)):
            router.float()
        return module

    megatron_training.Float16Module = convert


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run whose steps are watched."""

    ranks: int = 2
    flags: list[str] = field(default_factory=list)
    config: MoEOptimConfig = MoEOptimConfig(format="mxfp8", step="fused")  # noqa: RUF009  # frozen
    without: tuple[str, ...] = ()
    prepare: Callable[[], None] | None = None
    decoupled: bool = True
    own_norm: str | None = None


def fused(format: str) -> MoEOptimConfig:
    return MoEOptimConfig(format=format, step="fused")


BF16_GRADIENTS = ["--grad-reduce-in-bf16", "--main-grads-dtype", "bf16"]
CASES = {
    "data parallel": Case(ranks=3, flags=["--global-batch-size", "6", *ZEROS]),
    "tensor parallel": Case(flags=[*TP2, *COPIED_EXPERTS, *ZEROS], config=fused("nvfp4")),
    "tensor parallel, experts cut": Case(flags=[*TP2, "--moe-ffn-hidden-size", "128"]),
    "expert parallel": Case(flags=[*EP2, *ZEROS], config=fused("fp8_block")),
    "a stage without experts": Case(
        ranks=4, flags=[*PP2, *EP2, "--moe-layer-freq", "[0,1]", *ZEROS]
    ),
    "heads with a norm of their own": Case(
        flags=[*MTP, "--mtp-detach-heads", *EP2], own_norm="mtp"
    ),
    "an embedding on two stages": Case(flags=[*PP2, *MTP, *ZEROS]),
    "instances": Case(ranks=4, flags=["--num-distributed-optimizer-instances", "2"]),
    "dense": Case(without=(*EXPERT_FLAGS,), config=fused("bf16")),
    "bf16 experts, coupled decay": Case(
        prepare=couple_decay, decoupled=False, config=fused("bf16")
    ),
    "routers in fp32": Case(prepare=keep_routers_in_fp32),
    "bf16 gradients": Case(flags=BF16_GRADIENTS[:1]),
    "bf16 gradients and moments, two rates": Case(
        flags=[*NARROW.split(), *BF16_GRADIENTS, "--decoupled-lr", "3e-3"], config=fused("mxfp8_2d")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps_follow_from_gradients(name: str):
    """Every gradient counts once in the norm, also where ranks have copies of it, and what counts
    is what Megatron's own code counts; masters, moments and weights are those of plain torch.
    Gradients stay where and as they are."""
    case = CASES[name]
    runs: list[Run] = run_ranks(
        case.ranks, watch_run, [*RUN, *case.flags], case.config, case.without, case.prepare
    )
    assert all(run.is_fused and len(run.steps) == 3 for run in runs)
    assert_steps_follow(
        runs, clip_grad=CLIP_GRAD, decoupled=case.decoupled, own_norm=case.own_norm
    )
    assert (max(run.compared for run in runs) > 0) is (case.config.format != "bf16")
    for run in runs:
        for step in run.steps:
            assert (step.zeros is not None) is (ZEROS[0] in case.flags)
