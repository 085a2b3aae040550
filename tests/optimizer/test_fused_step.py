"""A fused step is one of Adam on every shard, with one norm over all gradients, to the bit."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.support.ranks import run_ranks
from tests.support.steps.fused_steps import Run, assert_steps_follow, watch_run

pytestmark = pytest.mark.slow

CLIP_GRAD = 0.5
RUN = ["--train-iters", "2", "--eval-interval", "1000000", "--clip-grad", f"{CLIP_GRAD}"]
TP2 = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
COPIED_EXPERTS = ["--expert-tensor-parallel-size", "1"]
EP2 = ["--expert-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
MTP = ["--mtp-num-layers", "1"]
EXPERTS = ("--num-experts", "--moe-router-topk", "--moe-grouped-gemm", "--moe-ffn-hidden-size")
EXPERTS += ("--moe-token-dispatcher-type",)
ZEROS = ["--log-num-zeros-in-grad"]


def keep_routers_in_fp32_and_couple_decay() -> None:
    """Have routers keep fp32 weights in a bf16 model, and Adam add weight decay to gradients.

    No flag of Megatron does.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import training as megatron_training

    stock = megatron_training.get_megatron_optimizer_config

    def coupled(args: Any) -> Any:
        config, overrides = stock(args)
        config.decoupled_weight_decay = False
        return config, overrides

    megatron_training.get_megatron_optimizer_config = coupled
    after_conversion(lambda module: isinstance(module, TopKRouter) and module.float())


def train_experts_alone() -> None:
    """Freeze all else, whose optimizer has nothing to step then."""
    from moe_optim.experts.grouped_linear import GroupedLinear

    def freeze(module: torch.nn.Module) -> None:
        if not isinstance(module, GroupedLinear):
            for param in module.parameters(recurse=False):
                param.requires_grad_(False)

    after_conversion(freeze)


def after_conversion(change: Callable[[torch.nn.Module], Any]) -> None:
    """Have all modules changed after the model became one of bf16, before DDP wraps it."""
    from megatron.core.transformer.module import Float16Module

    stock = Float16Module.__init__

    def convert(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        for module in self.modules():
            change(module)

    Float16Module.__init__ = convert


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


NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
BF16_GRADIENTS = ["--grad-reduce-in-bf16", "--main-grads-dtype", "bf16"]
CASES = {
    "tensor parallel": Case(flags=[*TP2, *COPIED_EXPERTS, *ZEROS], config=fused("nvfp4")),
    "a stage without experts": Case(
        ranks=4, flags=[*PP2, *EP2, "--moe-layer-freq", "[0,1]", *ZEROS]
    ),
    "heads with a norm of their own, an embedding on two stages": Case(
        flags=[*PP2, *MTP, "--mtp-detach-heads", *ZEROS], own_norm="mtp"
    ),
    "experts alone": Case(flags=EP2, prepare=train_experts_alone),
    "routers in fp32, coupled decay": Case(
        prepare=keep_routers_in_fp32_and_couple_decay, decoupled=False
    ),
    "bf16 gradients and moments, two rates": Case(
        flags=[*NARROW.split(), *BF16_GRADIENTS, "--decoupled-lr", "3e-3"], config=fused("mxfp8_2d")
    ),
}
MORE = {
    "data parallel": Case(ranks=3, flags=["--global-batch-size", "6", *ZEROS]),
    "tensor parallel, experts cut": Case(flags=[*TP2, "--moe-ffn-hidden-size", "128"]),
    "expert parallel": Case(flags=[*EP2, *ZEROS], config=fused("fp8_block_fp32")),
    "heads with a norm of their own, expert parallel": Case(
        flags=[*MTP, "--mtp-detach-heads", *EP2], own_norm="mtp"
    ),
    "instances": Case(ranks=4, flags=["--num-distributed-optimizer-instances", "2"]),
    "dense": Case(without=EXPERTS, config=fused("bf16")),
    "bf16 gradients": Case(flags=["--grad-reduce-in-bf16"]),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in CASES.items()]
    + [pytest.param(case, id=name, marks=pytest.mark.extended) for name, case in MORE.items()],
)
def test_steps_follow_from_gradients(case: Case):
    """Every gradient counts once in the norm, also where ranks have copies of it, and what counts
    is what Megatron's own code counts; masters, moments and weights are those of plain torch.
    Gradients stay where and as they are, and no master gets a copy of one."""
    runs: list[Run] = run_ranks(
        case.ranks, watch_run, [*RUN, *case.flags], case.config, case.without, case.prepare
    )
    assert all(run.is_fused and len(run.steps) == 2 for run in runs)
    assert_steps_follow(runs, clip_grad=CLIP_GRAD, decoupled=case.decoupled, own_norm=case.own_norm)
    assert (max(run.compared for run in runs) > 0) is (case.config.format != "bf16")
    assert {step.zeros is None for run in runs for step in run.steps} == {
        ZEROS[0] not in case.flags
    }
    assert all(False in run.parts for run in runs) is (case.prepare is train_experts_alone)
    dtypes = {dtype for run in runs for dtype in run.dtypes}
    assert (torch.float32 in dtypes) is (case.prepare is keep_routers_in_fp32_and_couple_decay)
    moments = {s.after["exp_avg"].dtype for run in runs for s in run.steps[0].shards.values()}
    assert moments == {torch.bfloat16 if "--exp-avg-dtype" in case.flags else torch.float32}
