"""Runs with fused steps are the same run however weights are gathered, cut, saved and resumed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.optimizer.test_ten_rows import by_expert
from tests.support.ranks import run_ranks
from tests.support.states.masters import assert_weights_come_from_masters
from tests.support.steps.fused_steps import owned, owned_range
from tests.support.training import (
    OVERLAP,
    Record,
    assert_same_run,
    assert_same_tensors,
    named_parameters,
    pretrain,
)

pytestmark = pytest.mark.slow

NEVER = 1_000_000
FLAGS = ["--train-iters", "4", "--clip-grad", "0.5"]
STATES = ("master", "exp_avg", "exp_avg_sq")


def extended(format: str) -> Any:
    return pytest.param(format, marks=pytest.mark.extended)


MORE_FORMATS = [extended(name) for name in ("nvfp4", "nvfp4_rows", "bf16")]


@dataclass
class States:
    """What one rank owns of everything that a checkpoint of the optimizer holds."""

    shapes: dict[str, torch.Size]
    """Of whole parameters."""
    shards: dict[str, tuple[int, dict[str, torch.Tensor]]]
    """First element, and master and moments, by the name of the parameter."""
    steps: set[int]
    is_fused: bool


def states_of(model: list[Any], optimizer: Any) -> States:
    """Return copies of what this rank owns."""
    names = {param: name for name, param in named_parameters(model)}
    shards, steps = {}, set()
    for param, master, group, part in owned(optimizer):
        moments = part.optimizer.state[master]
        tensors = [master.detach(), *(moments[name] for name in STATES[1:])]
        copies = {name: tensor.clone() for name, tensor in zip(STATES, tensors, strict=True)}
        shards[names[param]] = (owned_range(part, param).start, copies)
        steps.add(group["step"])
    shapes = {name: param.shape for param, name in names.items()}
    return States(shapes, shards, steps, optimizer.is_fused)


def whole_states(ranks: Sequence[States]) -> dict[str, torch.Tensor]:
    """Return whole masters and moments of all ranks, those of each expert apart."""
    whole = {}
    for state in STATES:
        of_state = {name: torch.full(shape, torch.nan) for name, shape in ranks[0].shapes.items()}
        for name, (start, tensors) in (item for rank in ranks for item in rank.shards.items()):
            shard = tensors[state]
            of_state[name].view(-1)[start : start + shard.numel()] = shard
        assert not any(tensor.isnan().any() for tensor in of_state.values())
        whole |= {f"{state} of {name}": of for name, of in by_expert(of_state).items()}
    return whole


def drop_of_last_rank(model: list[Any], _optimizer: Any) -> None:
    """Have the last rank add zeros to the gradients of all."""
    from moe_optim.buckets.bucket_group import bucket_groups

    def start_after_zeroing(group: Any) -> Callable[..., None]:
        stock = group.start_grad_sync

        def start(*args: Any, **kwargs: Any) -> None:
            for bucket in group.buckets:
                bucket.grad_data.zero_()
            stock(*args, **kwargs)

        return start

    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        for group in bucket_groups(model):
            group.start_grad_sync = start_after_zeroing(group)


def train(
    flags: list[str],
    config: MoEOptimConfig,
    after_setup: Callable[[list[Any], Any], None] | None = None,
) -> Record:
    """Train; what comes with the record are states, of weights that are known to come from them."""

    def observe(model: list[Any], optimizer: Any) -> States:
        weights = 4 if config.expert_layout == "grouped" else 4 * 4  # two linears, two layers
        expected = 0 if config.format == "bf16" else weights
        assert assert_weights_come_from_masters(model, optimizer) == expected
        return states_of(model, optimizer)

    return pretrain(flags, config, after_setup=after_setup, observe=observe)


@cache
def trained(ranks: int, config: MoEOptimConfig, *flags: str) -> list[Record]:
    """Return a run that several tests compare with, made once and left alone by all."""
    return run_ranks(ranks, train, [*FLAGS, *flags], config)


def fused(format: str, **knobs: Any) -> MoEOptimConfig:
    return MoEOptimConfig(format=format, step="fused", **knobs)


ONLY = ("--eval-interval", f"{NEVER}")


@pytest.mark.parametrize(
    ("wire", "flags"),
    [
        pytest.param("bf16", (*OVERLAP, "--eval-interval", "2"), id="all at once"),
        pytest.param("quantized", (*OVERLAP, *ONLY), id="overlap", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("format", ["mxfp8", *MORE_FORMATS])
def test_how_weights_are_gathered_leaves_no_trace(format: str, wire: str, flags: tuple[str, ...]):
    """Overlapped or in the step, on either wire, for an evaluation in between: losses, masters,
    moments and weights are the same."""
    only = trained(2, fused(format), *ONLY)
    config = fused(format, wire=wire, layout="stock" if wire == "bf16" else "aligned")
    for got, want in zip(trained(2, config, *flags), only, strict=True):
        assert want.extra.is_fused
        assert want.extra.steps == {4}
        got = replace(got, validation_losses=want.validation_losses)  # they read on in the data
        assert_same_run(got, want, what=f"{wire} {flags}")
    assert only[0].losses[4] < only[0].losses[1]


@pytest.mark.parametrize("format", ["mxfp8", *MORE_FORMATS])
def test_a_parameter_an_expert_or_one_of_all_is_the_same_though_gradients_are_clipped(format: str):
    """The norm is the same to the bit, and so are losses, masters, moments and weights."""
    assert_same_states(
        trained(2, fused(format, expert_layout="indexed"), *ONLY),
        trained(2, fused(format), *ONLY),
    )


def test_layouts_are_the_same_though_gradients_are_clipped():
    """Shards that begin elsewhere and, on 3 ranks, cut blocks or do not.

    Gloo adds up three gradients in an order that depends on where in a bucket they lie. Here those
    of one rank are zero, so that every order has the same sum.
    """
    flags = [*ONLY, *OVERLAP, "--ddp-bucket-size", "20000", "--moe-ffn-hidden-size", "208"]
    flags += ["--global-batch-size", "6"]
    aligned, stock = (
        run_ranks(3, train, [*FLAGS, *flags], fused("nvfp4", layout=layout), drop_of_last_rank)
        for layout in ("aligned", "stock")
    )
    places = [
        [{name: start for name, (start, _) in rank.extra.shards.items()} for rank in run]
        for run in (aligned, stock)
    ]
    assert places[0] != places[1]
    assert_same_states(aligned, stock)


def assert_same_states(got: list[Record], want: list[Record]) -> None:
    """Losses of each rank, whole masters and moments of all, and the bytes of each expert."""
    whole = (whole_states([record.extra for record in run]) for run in (got, want))
    assert_same_tensors(*whole, what="whole")
    for ours, theirs in zip(got, want, strict=True):
        assert ours.losses == theirs.losses
        assert_same_tensors(by_expert(ours.weights), by_expert(theirs.weights), what="weight")


# Checkpoints


def train_on(flags: list[str], config: MoEOptimConfig) -> tuple[States, States, Record]:
    """Return states after loading, at the end, and the run."""
    loaded: list[States] = []

    def keep(model: list[Any], optimizer: Any) -> None:
        if "--load" in flags:
            loaded.append(states_of(model, optimizer))

    record = pretrain(flags, config, after_setup=keep, observe=states_of)
    return (*loaded, record.extra)[0], record.extra, record


RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ("fused", "stock", "fused"),
        pytest.param("stock", "fused", "stock", marks=pytest.mark.extended),
    ],
)
def test_checkpoints_of_either_step_load_in_the_other(
    first: str, second: str, third: str, tmp_path: Path
):
    """Flat states on the way there, states by name on the way back: masters, moments and the count
    of steps are the same to the bit."""
    flags = ["--clip-grad", "0.5", *ONLY, "--train-iters", "6"]
    before: list[Any] = []
    for number, (step, how) in enumerate(((first, []), (second, [RESHARDABLE]), (third, []))):
        config = MoEOptimConfig(format="mxfp8", step=step)
        saving = ["--save", f"{tmp_path / str(number)}", "--exit-interval", f"{2 * number + 2}"]
        loading = ["--load", f"{tmp_path / str(number - 1)}"] if number else []
        after = run_ranks(2, train_on, [*flags, *how, *saving, *loading], config)
        for (_, ended, _), (loaded, _, _) in zip(before, after, strict=bool(before)):
            assert ended.is_fused is not loaded.is_fused
            assert ended.steps == loaded.steps == {2 * number}
            assert ended.shards.keys() == loaded.shards.keys()
            for name, (start, tensors) in ended.shards.items():
                assert loaded.shards[name][0] == start
                assert_same_tensors(loaded.shards[name][1], tensors, what=f"{step} {name}")
        before = after


@pytest.mark.extended
def test_resuming_goes_on_to_the_bit(tmp_path: Path):
    """A run that loads what another saved after 2 of 4 steps ends as the other."""
    config, flags = fused("nvfp4"), [*FLAGS, *ONLY, *OVERLAP]
    save, load = (f"--save {tmp_path} --save-interval 2", f"--load {tmp_path} --ckpt-step 2")
    whole, rest = (run_ranks(2, train, [*flags, *how.split()], config) for how in (save, load))
    for got, want in zip(rest, whole, strict=True):
        assert set(got.losses) == {3, 4}
        want = replace(want, losses={step: want.losses[step] for step in got.losses})
        assert_same_run(got, want, what="resumed")
