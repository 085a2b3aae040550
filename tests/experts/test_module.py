"""In bf16 the portable experts are Megatron's own to the bit, from the first step to the last."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.experts.operands import lie_together
from tests.support.modules import experts
from tests.support.modules.experts import by_layer
from tests.support.ranks import run_ranks
from tests.support.training import Record, assert_same_tensors, pretrain

pytestmark = pytest.mark.slow

STOCK = None
GROUPED = MoEOptimConfig(format="bf16")
INDEXED = MoEOptimConfig(format="bf16", expert_layout="indexed")
STEPS = ["--train-iters", "4", "--eval-interval", "1000"]
EP2 = ["--expert-model-parallel-size", "2"]
EXCHANGEABLE = ["--dist-ckpt-optim-fully-reshardable"]

Weights = dict[str, torch.Tensor]


def _train(flags: list[str], config: MoEOptimConfig | None) -> Record:
    """Train; ``extra`` holds the expert weights before the first step."""
    initial: Weights = {}

    def keep(model: list[Any], _optimizer: Any) -> None:
        named = {name: p.detach().clone() for name, p in model[0].module.named_parameters()}
        initial.update(by_layer(named))
        chunk = model[0]
        buffers = [one.param_data for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        for module in chunk.modules():
            if isinstance(module, GroupedLinear) and not module.storages():
                weights = module.weights()
                assert lie_together(weights)  # so that no forward product copies them
                assert all(
                    any(b.data_ptr() <= w.data_ptr() < b.data_ptr() + b.nbytes for b in buffers)
                    for w in weights
                )

    return pretrain(flags, config, after_setup=keep, observe=lambda *_: initial)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def run(checkpoints) -> Callable[..., list[Record]]:
    """Return a function that trains two ranks for 4 steps once, saving after 2, by kind."""

    @cache
    def train(config: MoEOptimConfig | None, *parallel: str) -> list[Record]:
        save = ["--save", str(checkpoints / folder_of(config)), "--save-interval", "2"]
        flags = [*STEPS, *parallel, *([] if parallel else [*EXCHANGEABLE, *save])]
        return run_ranks(2, _train, flags, config)

    return train


def folder_of(config: MoEOptimConfig | None) -> str:
    return "stock" if config is None else config.expert_layout


def assert_same_training(got: list[Record], want: list[Record]) -> None:
    """Losses and expert weights of two runs are equal to the bit, whatever holds the experts."""
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine.losses) == 4
        assert mine.losses == theirs.losses
        weights, expected = by_layer(mine.weights), by_layer(theirs.weights)
        assert len(expected) >= 2 * 2 * 2  # layers, local experts, linears
        assert_same_tensors(weights, expected, what="trained")


SAME_AS_STOCK = {
    "grouped": (GROUPED, ()),
    "indexed": pytest.param((INDEXED, ()), marks=pytest.mark.extended),
    "indexed, expert parallel": pytest.param((INDEXED, EP2), marks=pytest.mark.extended),
}


@pytest.mark.parametrize("kind", SAME_AS_STOCK.values(), ids=SAME_AS_STOCK)
def test_bf16_experts_start_and_train_as_megatrons_sequential_ones(run, kind):
    """The same bits expert by expert, so that a seed means the same model. On 2 data-parallel
    ranks, where a clipped norm would sum in another order, or with half of the experts on each,
    drawn from a random stream of its own."""
    config, parallel = kind
    ours, stock = run(config, *parallel), run(STOCK, *parallel)
    for mine, theirs in zip(ours, stock, strict=True):
        assert len(theirs.extra) == 2 * 2 * (2 if parallel else 4)  # layers, linears, experts
        assert_same_tensors(mine.extra, theirs.extra, what="initial")
    assert_same_training(ours, stock)
    assert torch.equal(*(list(rank.extra.values())[0] for rank in stock)) is not bool(parallel)


EXCHANGES = {
    "sequential into grouped": (STOCK, GROUPED),
    "grouped into sequential": (GROUPED, STOCK),
}


@pytest.mark.parametrize(("saved", "loaded"), EXCHANGES.values(), ids=EXCHANGES)
def test_checkpoints_are_exchangeable_in_the_middle_of_training(run, checkpoints, saved, loaded):
    """Weights, masters, moments and step of 2 iterations load into other experts, and iterations 3
    and 4 give the losses and weights of the run that went on."""
    whole = run(saved)
    load = ["--load", str(checkpoints / folder_of(saved)), "--ckpt-step", "2"]
    rest = run_ranks(2, _train, [*STEPS, *EXCHANGEABLE, *load], loaded)
    for mine, theirs in zip(rest, whole, strict=True):
        assert mine.losses == {step: theirs.losses[step] for step in (3, 4)}
        assert_same_tensors(by_layer(mine.weights), by_layer(theirs.weights), what="resumed")


# Refusing


def _build_what_is_refused() -> str:
    experts.start_ranks()
    config = experts.make_config()
    # with the default --moe-router-topk
    config.moe_apply_probs_on_input = config.moe_paged_stash = True
    with pytest.raises(ConfigError) as error:
        experts.make_ours(config)
    return str(error.value)


def test_what_the_experts_do_not_have_is_refused_before_they_are_built():
    first, *lines = run_ranks(1, _build_what_is_refused)[0].splitlines()
    assert first.startswith("experts: expected settings that go together")
    assert [line.strip().partition(":")[0] for line in lines] == [
        "--moe-paged-stash",
        "--moe-apply-probs-on-input with --moe-router-topk above 1",
    ]
