"""Masters and moments on the host: the same run to the bit, and at home after everything."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.kernels import staging
from moe_optim.optimizer.host_states import HostStates
from tests.optimizer.test_fused_runs import FLAGS, ONLY, fused, states_of, trained
from tests.support.ranks import on_ranks, run_ranks
from tests.support.states import life_cycle
from tests.support.steps.host_states import share_at_home
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain

Share = tuple[int, int]


def _train(flags: list[str], config: MoEOptimConfig) -> Record:
    staging.SMALLEST, staging.CHUNK_BYTES = 2000, 100_000  # smaller ones are stepped in place

    def observe(model: list[Any], optimizer: Any) -> tuple[Any, Share]:
        return states_of(model, optimizer), share_at_home(optimizer)

    return pretrain(flags, config, observe=observe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "fraction", "flags"),
    [
        pytest.param("nvfp4", 1, OVERLAP, id="all"),
        pytest.param("mxfp8", 0.5, (), id="half", marks=pytest.mark.extended),
        pytest.param("bf16", 1, (), id="bf16", marks=pytest.mark.extended),
        pytest.param("fp8_block", 0.25, (), id="a quarter", marks=pytest.mark.extended),
    ],
)
def test_states_on_the_host_leave_no_trace(format: str, fraction: float, flags: tuple[str, ...]):
    """Losses, masters, moments and weights of each rank are those without, clipping active."""
    config = fused(format, offload_states=fraction)
    runs = run_ranks(2, _train, [*FLAGS, *ONLY, *flags], config)
    for got, want in zip(runs, trained(2, fused(format), *ONLY), strict=True):
        states, (at_home, total) = got.extra
        assert states.is_fused
        assert at_home == total if fraction == 1 else 0 < at_home <= fraction * total
        assert_same_run(got, want, what=f"{fraction} on the host")


@pytest.mark.slow
@pytest.mark.extended
def test_resuming_with_states_elsewhere_goes_on_to_the_bit(tmp_path):
    """Saved flat with all states on the host, loaded without any, saved by name, loaded with half,
    saved flat, loaded with all: the run ends as one on the device that never stopped."""
    by_name = "--dist-ckpt-optim-fully-reshardable"
    legs = [
        (1, ["--save", f"{tmp_path}/0", "--exit-interval", "1"]),
        (
            0,
            ["--load", f"{tmp_path}/0", "--save", f"{tmp_path}/1", "--exit-interval", "2", by_name],
        ),
        (0.5, ["--load", f"{tmp_path}/1", "--save", f"{tmp_path}/2", "--exit-interval", "3"]),
        (1, ["--load", f"{tmp_path}/2"]),
    ]
    for fraction, flags in legs:
        config = fused("mxfp8", offload_states=fraction)
        last = run_ranks(2, _train, [*FLAGS, *ONLY, *flags], config)
        for record in last:
            _, (at_home, total) = record.extra
            assert at_home == total if fraction == 1 else at_home <= fraction * total
    for got, want in zip(last, trained(2, fused("mxfp8"), *ONLY), strict=True):
        want = replace(want, losses={step: want.losses[step] for step in got.losses})
        want = replace(want, validation_losses=got.validation_losses)
        assert_same_run(got, want, what="resumed")


def _keep_each() -> dict[float, dict[str, Share]]:
    life_cycle.initialize()
    return {fraction: _keep(fraction) for fraction in (0.75, 1)}


def _keep(fraction: float) -> dict[str, Share]:
    cycle = life_cycle.LifeCycle(step="fused", offload_states=fraction)
    shares: dict[str, Share] = {}
    train = [("zero", {}), ("micro", {"seed": 1, "last": True}), ("step", {})]

    def do(what: str, *calls: tuple[str, dict[str, Any]]) -> None:
        for name, arguments in calls:
            getattr(cycle, name)(**arguments)
            cycle.check()
        shares[what] = share_at_home(cycle.optimizer)

    do("a step", *train)
    for what in life_cycle.EXCHANGED:  # by verl's calls for optimizers, and by Adam's own
        do(f"a step after exchanging {what}", ("exchange", {"what": what}), *train)
    do("offload_to_cpu and restore_from_cpu", ("rest", {}))
    do("a load", ("save", {}), *train, ("load", {}))
    for part in cycle.optimizer.chained_optimizers:
        part.optimizer.load_state_dict = _into_new_memory(part.optimizer.load_state_dict)
    do("a load by Transformer Engine's Adam", ("load", {}))
    do("verl's calls for a model", ("send_all_away", {}), ("bring_back", {}), *train)
    return shares


def test_states_come_home_wherever_they_were_put():
    for fraction, shares in run_ranks(1, _keep_each)[0].items():
        assert len(set(shares.values())) == 1, shares
        ((at_home, total),) = set(shares.values())
        assert at_home == total if fraction == 1 else 0 < at_home <= fraction * total


def _into_new_memory(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a load after which Adam has other tensors of moments, as Transformer Engine's has."""
    return lambda state: load(deepcopy(state))


def _at_home() -> tuple[HostStates, torch.Tensor, Any]:
    """Return states at home, their master, and Adam with its moments."""
    master = torch.arange(8.0)
    adam = SimpleNamespace(
        state={master: {"exp_avg": torch.full((8,), 2.0), "exp_avg_sq": torch.full((8,), 3.0)}}
    )
    states = HostStates([master], 1.0)
    states.keep(adam, master)
    return states, master, adam


def test_moments_that_come_back_in_another_dtype_keep_it():
    """As a checkpoint of a precision-aware step has them."""
    states, master, adam = _at_home()
    for name, value in (("exp_avg", 5.0), ("exp_avg_sq", 7.0)):
        adam.state[master][name] = torch.full((8,), value, dtype=torch.bfloat16)
    states.keep(adam, master)
    for name, value in (("exp_avg", 5.0), ("exp_avg_sq", 7.0)):
        moment = adam.state[master][name]
        assert (moment.dtype, moment.tolist()) == (torch.bfloat16, [value] * 8)
    assert [one.dtype for one in states.on_host(master)] == [torch.float32, *[torch.bfloat16] * 2]


@pytest.mark.parametrize("side", ["call_them_the_hosts", "call_them_the_devices"])
def test_what_is_elsewhere_by_now_is_left_alone(side: str):
    """A moment that somebody has replaced is theirs until the next step."""
    states, master, adam = _at_home()
    adam.state[master]["exp_avg"] = other = torch.full((8,), 5.0)
    getattr(states, side)(adam)
    assert adam.state[master]["exp_avg"] is other
    assert other.tolist() == [5.0] * 8
    assert adam.state[master]["exp_avg_sq"].tolist() == [3.0] * 8


@on_ranks(1)
def test_a_step_that_turns_out_to_be_megatrons_is_refused():
    """``auto`` fuses where states are on the host, but not with ``layout: stock``, which
    the other wire has here."""
    life_cycle.initialize()
    life_cycle.LifeCycle(step="auto", offload_states=0.5)
    with pytest.raises(ConfigError) as error:
        life_cycle.LifeCycle(step="auto", wire="bf16", offload_states=0.5)
    said = str(error.value)
    assert said.startswith("moe_optim: offload_states: 0.5 with layout: stock: Megatron's step")
    assert said.endswith("Set step: fused; or leave states on the device.")


def test_megatrons_step_is_refused_with_the_knobs():
    message = "^recipe: offload_states with step: stock: .* Write 0, or step: fused"
    with pytest.raises(ConfigError, match=message):
        MoEOptimConfig.from_mapping({"step": "stock", "offload_states": 1}, "recipe")
    assert not MoEOptimConfig(step="stock", offload_states=0).offload_states
