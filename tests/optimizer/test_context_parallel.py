"""Whole models whose sequences are cut over context-parallel ranks, as Megatron cuts them."""

import copy
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from moe_optim.config import MoEOptimConfig
from moe_optim.formats.reference.adam import step_into
from moe_optim.optimizer.adam import GroupStepAdam, hyper_of, moments_of
from tests.support.ranks import run_ranks
from tests.support.training import (
    OVERLAP,
    Record,
    assert_same_run,
    pretrain,
)
from tests.support.training_runs.stock_muon import gather_uneven_parts

pytestmark = pytest.mark.slow

RUN = ["--train-iters", "4", "--eval-interval", "2"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
AUX = shlex.split("--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2")
MUON = ["--optimizer", "muon"]


def cut(whole: Tensor, axis: int) -> Tensor:
    """Return this rank's part of sequences: a chunk of the first half, its mirror of the second."""
    rank = parallel_state.get_context_parallel_rank()
    chunks = whole.chunk(2 * parallel_state.get_context_parallel_world_size(), axis)
    return torch.cat([chunks[rank], chunks[len(chunks) - 1 - rank]], axis)


class JoinedSequences(torch.autograd.Function):
    """All-gather parts of sequences, [S / ranks, ...]; a part's gradient is the sum over ranks."""

    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group)
        first, second = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*first, *reversed(second)])

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.float()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return cut(total, 0).to(gradient.dtype)


class WholeAttention(DotProductAttention):
    """Megatron's attention in plain torch over whole sequences, of which each rank keeps its part.

    Megatron's own refuses context parallelism.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.context_parallel_size = 1
        super().__init__(config, *args, **kwargs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = (JoinedSequences.apply(one) for one in (query, key, value))
        return cut(super().forward(*whole, *args, **kwargs), 0)


def cut_sequences() -> None:
    """Let ``moe-optim train`` cut sequences in this process."""
    from moe_optim.commands.train import layer_spec
    from moe_optim.commands.train import pretrain as rank

    step, spec = rank.forward_step, layer_spec.layer_spec

    def forward_step(batches: Any, model: Any, *args: Any) -> Any:
        if batches is not None:
            batches = iter([{name: cut(whole, 1) for name, whole in next(batches).items()}])
        return step(batches, model, *args)

    def spec_of(*args: Any) -> Any:
        made = spec(*args)
        layer_spec._replace(made, DotProductAttention, WholeAttention)
        return made

    rank.forward_step, layer_spec.layer_spec = forward_step, spec_of
    rank.refuse_unsupported = lambda _: None


def step_as_transformer_engine() -> None:
    """Give Megatron's Adam in this process the arithmetic that a fused step has."""

    def step_group(adam: Any, group: dict[str, Any]) -> None:
        hyper, one = hyper_of(group), torch.ones(())
        group["step"] = hyper.step
        for master in group["params"]:
            row, moments = torch.tensor(hyper.row()), moments_of(adam, master)
            step_into(master, master.grad, *moments, hyper=row, clip=one, decoupled=True)

    GroupStepAdam._step_group = step_group


def train(flags: list[str], config: MoEOptimConfig, is_ours: bool = True) -> Record:
    cut_sequences()
    step_as_transformer_engine()
    gather_uneven_parts()  # for Megatron's own Muon
    return pretrain([*RUN, *flags], config, optimizer=is_ours)


def cases(brief: str, of_name: dict[str, tuple[Any, ...]]) -> Any:
    """Return the cases of a test, of which all but one are left to ``make test-all``."""
    return [
        pytest.param(*case, id=name, marks=[pytest.mark.extended] * (name != brief))
        for name, case in of_name.items()
    ]


# Beside Megatron

BF16 = MoEOptimConfig(format="bf16", layout="stock")
FUSED = replace(BF16, step="fused")
BESIDE_MEGATRON = {  # ranks, flags, configuration
    "fused, experts over ranks": (2, [*EP2, *OVERLAP, "--calculate-per-token-loss"], FUSED),
    "Megatron's step, clipped": (2, [*OVERLAP, "--clip-grad", "1.0"], BF16),
    "4 parts": (4, ["--context-parallel-size", "4"], FUSED),
    "Muon": (2, [*MUON, *OVERLAP], replace(BF16, expert_layout="indexed", step="stock")),
}


@pytest.mark.parametrize(
    ("ranks", "flags", "config"), cases("fused, experts over ranks", BESIDE_MEGATRON)
)
def test_bf16_experts_train_as_under_megatrons_optimizer(
    ranks: int, flags: list[str], config: MoEOptimConfig
):
    """Losses, masters, moments and weights are Megatron's to the bit, evaluations included."""
    flags = [*CP2, *AUX, *flags]
    stock = run_ranks(ranks, train, flags, config, False)
    ours = run_ranks(ranks, train, flags, config)
    assert len(ours[-1].losses) == 4
    for rank in range(ranks):
        if not stock[rank].masters:  # Megatron's own Muon shards nothing
            ours[rank].masters, ours[rank].moments = {}, {}
        assert ours[rank].classes.isdisjoint(stock[rank].classes)
        assert_same_run(ours[rank], stock[rank], what=f"rank {rank}")
