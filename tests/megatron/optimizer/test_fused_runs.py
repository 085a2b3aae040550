"""Runs with fused steps are the same run however weights are gathered, cut, saved and resumed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from tests.megatron.optimizer.test_ten_rows import by_expert
from tests.support.bytes import assert_bytes_equal
from tests.support.fused_steps import owned, owned_range
from tests.support.masters import assert_weights_come_from_masters
from tests.support.ranks import run_ranks
from tests.support.training import (
    OVERLAP,
    Record,
    assert_same_run,
    assert_same_tensors,
    named_parameters,
    pretrain,
)

pytestmark = pytest.mark.slow

RANKS = 3  # shards cut blocks
NEVER = 1_000_000
FLAGS = ["--train-iters", "6", "--global-batch-size", "6", "--ddp-bucket-size", "20000"]
FLAGS += ["--moe-ffn-hidden-size", "208", "--clip-grad", "0.5"]
STATES = ("master", "exp_avg", "exp_avg_sq")
FORMATS = [
    "nvfp4",
    pytest.param("mxfp8", marks=pytest.mark.extended),
    pytest.param("mxfp8_2d", marks=pytest.mark.extended),
    pytest.param("fp8_block", marks=pytest.mark.extended),
    pytest.param("bf16", marks=pytest.mark.extended),
]


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


def train(flags: list[str], config: MoEOptimConfig) -> Record:
    """Train; what comes with the record are states, of weights that are known to come from them."""

    def observe(model: list[Any], optimizer: Any) -> States:
        expected = 0 if config.format == "bf16" else len(by_layout(config))
        assert assert_weights_come_from_masters(model, optimizer) == expected
        return states_of(model, optimizer)

    return pretrain(flags, config, observe=observe)


def by_layout(config: MoEOptimConfig) -> range:
    """Return as many as there are quantized weights: of two linears in two layers."""
    return range(4 if config.expert_layout == "grouped" else 4 * 4)


@cache
def trained(config: MoEOptimConfig, *flags: str) -> list[Record]:
    """Return a run that several tests compare with, made once and left alone by all."""
    return run_ranks(RANKS, train, [*FLAGS, *flags], config)


def fused(format: str, **knobs: Any) -> MoEOptimConfig:
    return MoEOptimConfig(format=format, step="fused", **knobs)


ONLY = ("--eval-interval", f"{NEVER}")


@pytest.mark.parametrize(
    ("wire", "flags"),
    [
        pytest.param("bf16", (*OVERLAP, "--eval-interval", "2"), id="all at once"),
        pytest.param("quantized", (*OVERLAP, *ONLY), id="overlap", marks=pytest.mark.extended),
        pytest.param("bf16", ONLY, id="wire bf16", marks=pytest.mark.extended),
        pytest.param(
            "quantized", ("--eval-interval", "2"), id="evaluations", marks=pytest.mark.extended
        ),
    ],
)
@pytest.mark.parametrize("format", ["mxfp8", *FORMATS[:1], *FORMATS[2:]])
def test_how_weights_are_gathered_leaves_no_trace(format: str, wire: str, flags: tuple[str, ...]):
    """Overlapped or in the step, on either wire, for an evaluation in between: losses, masters,
    moments and weights are the same."""
    narrow = () if format == "nvfp4" else ("--moe-ffn-hidden-size", "96")
    only = trained(fused(format, layout="stock"), *ONLY, *narrow)
    other = trained(fused(format, wire=wire, layout="stock"), *flags, *narrow)
    for got, want in zip(other, only, strict=True):
        assert want.extra.is_fused
        assert want.extra.steps == {6}
        got = replace(got, validation_losses=want.validation_losses)  # they read on in the data
        assert_same_run(got, want, what=f"{wire} {flags}")
    assert only[0].losses[6] < only[0].losses[1]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "knobs", [{"layout": "aligned"}, {"layout": "aligned", "expert_layout": "indexed"}], ids=str
)
def test_cuts_change_nothing_though_gradients_are_clipped(format: str, knobs: dict[str, Any]):
    """Shards that begin elsewhere, and a parameter an expert: the norm is the same to the bit, and
    so are losses, masters, moments and weights."""
    flags = (*ONLY, *(("--moe-ffn-hidden-size", "192") if format != "nvfp4" else ()))
    stock = trained(fused(format, layout="stock"), *flags)
    other = trained(fused(format, **knobs), *flags)
    ends = [[shard[0] for shard in r.extra.shards.values()] for run in (stock, other) for r in run]
    assert ends[:RANKS] != ends[RANKS:], "shards begin where they did"
    wanted = whole_states([record.extra for record in stock])
    got = whole_states([record.extra for record in other])
    assert_same_tensors(got, wanted, what=f"{knobs}")
    for ours, theirs in zip(other, stock, strict=True):
        assert ours.losses == theirs.losses
        assert_same_tensors(by_expert(ours.weights), by_expert(theirs.weights), what=f"{knobs}")


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
    flags = ["--clip-grad", "0.5", "--eval-interval", f"{NEVER}", "--train-iters", "6"]
    before: list[Any] = []
    for number, (step, how) in enumerate(((first, []), (second, [RESHARDABLE]), (third, []))):
        config = MoEOptimConfig(format="mxfp8", step=step)
        saving = ["--save", f"{tmp_path / str(number)}", "--exit-interval", f"{2 * number + 2}"]
        loading = ["--load", f"{tmp_path / str(number - 1)}"] if number else []
        after = run_ranks(2, train_on, [*flags, *how, *saving, *loading], config)
        for (_, ended, _), (loaded, _, _) in zip(before, after, strict=bool(before)):
            assert (ended.is_fused, loaded.is_fused) != (loaded.is_fused, ended.is_fused)
            assert ended.steps == loaded.steps == {2 * number}
            assert ended.shards.keys() == loaded.shards.keys()
            for name, (start, tensors) in ended.shards.items():
                assert loaded.shards[name][0] == start
                assert_same_tensors(loaded.shards[name][1], tensors, what=f"{step} {name}")
        before = after


@pytest.mark.parametrize(
    "how", [[*OVERLAP], pytest.param([RESHARDABLE], marks=pytest.mark.extended)], ids=str
)
def test_resuming_goes_on_to_the_bit(how: list[str], tmp_path: Path):
    """A run that stops after 3 of 6 steps and loads its checkpoint ends as one that never did."""
    config, flags = fused("nvfp4"), [*FLAGS, *how, "--eval-interval", "2"]
    whole = run_ranks(RANKS, train, flags, config)
    run_ranks(RANKS, train, [*flags, "--save", f"{tmp_path}", "--exit-interval", "3"], config)
    rest = run_ranks(RANKS, train, [*flags, "--load", f"{tmp_path}"], config)
    for got, want in zip(rest, whole, strict=True):
        assert set(got.losses) == {4, 5, 6}
        want = replace(want, losses={step: want.losses[step] for step in got.losses})
        want = replace(want, validation_losses=got.validation_losses)
        assert_same_run(got, want, what="resumed")
        for name, (_, tensors) in want.extra.shards.items():
            for state, tensor in tensors.items():
                assert_bytes_equal(got.extra.shards[name][1][state], tensor, what=name)
