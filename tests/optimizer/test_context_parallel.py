"""Whole models whose sequences are cut over context-parallel ranks, as Megatron cuts them."""

import copy
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from moe_optim.config import MoEOptimConfig
from moe_optim.formats.reference.adam import Hyper, step_into
from moe_optim.optimizer.adam import GroupStepAdam, moments_of
from tests.support import training
from tests.support.ranks import run_ranks
from tests.support.training import (
    OVERLAP,
    Record,
    assert_same_run,
    assert_same_tensors,
    pretrain,
)
from tests.support.training_runs.stock_muon import gather_uneven_parts

pytestmark = pytest.mark.slow

RUN = ["--train-iters", "3", "--eval-interval", "2"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
INSTANCES = ["--num-distributed-optimizer-instances", "2", "--global-batch-size", "8"]
BY_ALL_EXPERTS = ["--moe-router-topk", "4", "--moe-z-loss-coeff", "1e-2"]
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


def attend_to_whole_sequences() -> None:
    """Let ``moe-optim train`` take context parallelism without Transformer Engine's attention."""
    from moe_optim.commands.train import layer_spec
    from moe_optim.commands.train import pretrain as rank

    spec = layer_spec.layer_spec

    def spec_of(*args: Any) -> Any:
        made = spec(*args)
        layer_spec._replace(made, DotProductAttention, WholeAttention)
        return made

    layer_spec.layer_spec = spec_of
    rank.refuse_unsupported = lambda _: None


def step_as_transformer_engine() -> None:
    """Give Megatron's Adam in this process the arithmetic that a fused step has."""

    def step_group(adam: Any, group: dict[str, Any]) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        names = ("lr", "betas", "eps", "weight_decay", "step")
        hyper, one = Hyper(**{name: group[name] for name in names}), torch.ones(())
        for master in group["params"]:
            row, moments = torch.tensor(hyper.row()), moments_of(adam, master)
            step_into(master, master.grad, *moments, hyper=row, clip=one, decoupled=True)

    GroupStepAdam._step_group = step_group


def train(flags: list[str], config: MoEOptimConfig, is_ours: bool = True) -> Record:
    """Train; ``extra`` is the state before the first step, as loaded."""
    attend_to_whole_sequences()
    step_as_transformer_engine()
    gather_uneven_parts()  # for Megatron's own Muon
    loaded = Record()
    return pretrain(
        [*RUN, *flags],
        config,
        optimizer=is_ours,
        after_setup=lambda *built: training._record_state(loaded, *built),
        observe=lambda *_: loaded,
    )


def cases(brief: str, of_name: dict[str, tuple[Any, ...]]) -> Any:
    """Return the cases of a test, of which all but ``brief`` are left to ``make test-all``."""
    return [
        pytest.param(*case, id=name, marks=[pytest.mark.extended] * (name != brief))
        for name, case in of_name.items()
    ]


# Cut sequences and whole ones


def states_of(records: Iterable[Record]) -> dict[str, Tensor]:
    """Return masters and moments by name, flat, joined from the parts that ranks own in turn."""
    parts: dict[str, list[Tensor]] = {}
    for record in records:
        for name, master in record.masters.items():
            for kind, values in {"master": master, **record.moments[name]}.items():
                if isinstance(values, Tensor) and values.numel() == master.numel():
                    parts.setdefault(f"{name} {kind}", []).append(values.flatten())
    return {name: torch.cat(of_ranks) for name, of_ranks in parts.items()}


WHOLE_AND_CUT = {  # format, flags
    "Muon": ("mxfp8_2d", MUON),
    "Adam, bf16": ("bf16", []),
    "Adam, experts over ranks": ("mxfp8_2d", EP2),
    "Adam, per token": ("mxfp8_2d", ["--calculate-per-token-loss", "--overlap-grad-reduce"]),
}


@pytest.mark.parametrize(("format", "flags"), cases("Muon", WHOLE_AND_CUT))
def test_ranks_with_halves_of_sequences_step_as_one_with_whole_ones(
    format: str, flags: list[str], tmp_path: Path
):
    """Loss, norm and every gradient, up to sums in bf16 in another order: cutting changes a few of
    them, each by a rounding of 2^-9. Every expert gets every token, lest rounding routes some
    elsewhere. States pass through checkpoints from one rank to two and back to the bit."""
    config, first, second = MoEOptimConfig(format=format), tmp_path / "1", tmp_path / "2"
    flags = [*flags, *BY_ALL_EXPERTS, "--dist-ckpt-optim-fully-reshardable"]
    flags += ["--eval-interval", "1000", "--override-opt_param-scheduler"]
    one_rank = [*flags, "--expert-model-parallel-size", "1"]

    start = run_ranks(1, train, [*one_rank, "--train-iters", "1", "--save", str(first)], config)
    step = ["--train-iters", "2", "--load", str(first)]
    (whole,) = run_ranks(1, train, [*one_rank, *step], config)
    halves = run_ranks(2, train, [*flags, *CP2, *step, "--save", str(second)], config)
    step[-1] = str(second)
    (loaded,) = run_ranks(1, train, [*one_rank, *step], config)

    assert_same_tensors(states_of(half.extra for half in halves), states_of(start), what="to 2")
    assert_same_tensors(states_of([loaded.extra]), states_of(halves), what="back to 1")
    assert list(whole.losses) == [2]
    for half in halves:
        assert half.losses == pytest.approx(whole.losses, rel=2**-12)
        assert half.norms == pytest.approx(whole.norms, rel=2**-6)
    got, want = states_of(halves), states_of([whole])
    assert got.keys() == want.keys()
    for name in want:
        if name.endswith((" exp_avg", " momentum_buffer")):
            assert (got[name] - want[name]).norm() < 2**-6 * want[name].norm(), name


# Beside Megatron

BF16 = MoEOptimConfig(format="bf16", layout="stock")
FUSED = replace(BF16, step="fused")
BESIDE_MEGATRON = {  # ranks, flags, configuration
    "fused, experts over ranks": (2, [*EP2, *OVERLAP, "--calculate-per-token-loss"], FUSED),
    "Megatron's step, clipped": (2, [*OVERLAP, "--clip-grad", "1.0"], BF16),
    "2 copies of experts": (4, [*EP2, *OVERLAP], FUSED),
    "4 parts": (4, ["--context-parallel-size", "4"], FUSED),
    "cut experts": (4, [*TP2, *OVERLAP, "--moe-ffn-hidden-size", "128"], FUSED),
    "2 instances": (4, [*INSTANCES, *OVERLAP], FUSED),
    "2 stages": (4, [*PP2, *OVERLAP], FUSED),
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
    assert len(ours[-1].losses) == 3
    for rank in range(ranks):
        if not stock[rank].masters:  # Megatron's own Muon shards nothing
            ours[rank].masters, ours[rank].moments = {}, {}
        assert ours[rank].classes.isdisjoint(stock[rank].classes)
        assert_same_run(ours[rank], stock[rank], what=f"rank {rank}")


def _train_on_uneven_batches(config: MoEOptimConfig, is_ours: bool) -> Record:
    """Train on one micro-batch a step on the first of two ranks, and on three on the second."""
    from megatron.training import training as loop

    loop.get_num_microbatches = lambda: 1 + 2 * dist.get_rank()
    return train([*OVERLAP, "--calculate-per-token-loss"], config, is_ours)


@pytest.mark.extended
def test_ranks_may_take_numbers_of_micro_batches_of_their_own():
    """As they do with ``--hybrid-context-parallel``, which gives each sample ranks of its own:
    losses, masters, moments and weights are Megatron's to the bit."""
    stock, ours = (run_ranks(2, _train_on_uneven_batches, FUSED, mine) for mine in (False, True))
    for rank in range(2):
        assert_same_run(ours[rank], stock[rank], what=f"rank {rank}")
