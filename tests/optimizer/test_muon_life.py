"""What a step of Muon reads anew, what hooks and policies do to it, and what it refuses by name.

Small models under the real DDP and optimizer; see ``tests/support/states/life_cycle.py``. Twins are
runs that were given the same values in place: they end with the same bytes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError, StateError
from tests.optimizer.test_nonfinite import _snapshot
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.states import life_cycle
from tests.support.wrapping import build_optimizer, layer_config, wrap

Change = Callable[[life_cycle.LifeCycle], Any]


def _after_two_steps(step: str = "fused") -> life_cycle.LifeCycle:
    """Return a model whose matrices are all Muon's, with gradients for a third step."""
    cycle = life_cycle.LifeCycle(step=step, optimizer="muon")
    for seed in (1, 2):
        cycle.zero()
        cycle.micro(seed, last=True)
        cycle.step()
    cycle.zero()
    cycle.micro(3, last=True)
    return cycle


def _third_step(change: Change, step: str = "fused") -> tuple[dict[str, torch.Tensor], list[float]]:
    cycle = _after_two_steps(step)
    change(cycle)
    result = cycle.optimizer.step()
    return _snapshot([cycle.ddp], cycle.optimizer), [float(of or 0) for of in result]


def _inners(cycle: life_cycle.LifeCycle) -> list[Any]:
    return [part.optimizer for part in cycle.parts]


def _masters(cycle: life_cycle.LifeCycle) -> dict[int, torch.Tensor]:
    return {number: one for part in cycle.parts for number, _, one in cycle._masters_of(part)}


# Twins


def _clip(cycle: life_cycle.LifeCycle) -> None:
    for part in cycle.parts:
        part.config.clip_grad = 0.25


def _clip_in_place(cycle: life_cycle.LifeCycle) -> None:
    """By two norms: the last layer has one of its own."""
    for layers in (cycle.params[:2], cycle.params[2:]):
        squares = sum(param.main_grad.double().square().sum() for param in layers)
        norm = torch.as_tensor(squares).sqrt().float()
        for param in layers:
            param.main_grad.mul_((0.25 / (norm + 1e-6)).clamp_max(1.0))


def _lose_momentum(cycle: life_cycle.LifeCycle) -> None:
    for inner in _inners(cycle):
        for state in inner.state.values():
            del state["momentum_buffer"]


def _zero_momentum(cycle: life_cycle.LifeCycle) -> None:
    for inner in _inners(cycle):
        for state in inner.state.values():
            state["momentum_buffer"].zero_()


TWINS: dict[str, tuple[Change, Change]] = {
    "gradients are clipped": (_clip, _clip_in_place),
    "momentum is gone": (_lose_momentum, _zero_momentum),
}


@life_cycle.on_a_rank
def test_a_step_reads_what_is_there_now():
    """Momentum and thresholds that were exchanged give the bits of those that were written in
    place."""
    unchanged, _ = _third_step(lambda _: None)
    for name, (change, twin) in TWINS.items():
        got, (_, norm, _) = _third_step(change)
        expected, (_, norm_of_twin, _) = _third_step(twin)
        assert_same_tensors(got, expected, what=name)
        assert any(not torch.equal(unchanged[key], of) for key, of in got.items()), name
        if change is not _clip:  # norms are those of unclipped gradients
            assert norm == norm_of_twin, name


# Rates


def _step_with_rates(step: str) -> None:
    cycle = _after_two_steps(step)
    reference = cycle.expected.adam
    for rates in (
        {"lr": 0.002, "momentum": 0.5},
        {"weight_decay": 0.0},
        {"lr": 0.0},
        {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.3},
    ):
        for inner in _inners(cycle):
            inner.param_groups[0].update(rates)
        for number, hyper in reference.hyper.items():
            reference.hyper[number] = replace(hyper, **rates)
        cycle.step()
        cycle.check()
        cycle.zero()
        cycle.micro(4, last=True)
    (group, *others) = _inners(cycle)[0].param_groups
    assert not others
    moved = group["params"].pop()  # the masters of the first two layers come in some order
    number = next(n for n, master in _masters(cycle).items() if master is moved)
    _inners(cycle)[0].param_groups.append({**group, "params": [moved], "lr": 0.005})
    reference.hyper[number] = replace(reference.hyper[number], lr=0.005)
    cycle.step()
    cycle.check()


@life_cycle.on_a_rank
def test_a_matrix_has_the_rates_of_the_group_that_it_is_in_now():
    """Learning rate, momentum and decay may change at any step, to zero, too; so may the group."""
    for step in ("fused", "stock"):
        _step_with_rates(step)


# What is refused


def _shorten_momentum(cycle: life_cycle.LifeCycle) -> None:
    state = next(iter(_inners(cycle)[0].state.values()))
    state["momentum_buffer"] = state["momentum_buffer"][:-1]


def _narrow_momentum(cycle: life_cycle.LifeCycle) -> None:
    state = next(iter(_inners(cycle)[0].state.values()))
    state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


REFUSED: dict[str, tuple[Change, str]] = {
    "momentum of another length": (_shorten_momentum, "momentum.*expected"),
    "momentum in bf16": (_narrow_momentum, r"momentum.*expected .*float32.*bfloat16"),
}


@life_cycle.on_a_rank
def test_what_a_step_cannot_use_is_refused_before_a_master_moves():
    for name, (change, says) in REFUSED.items():
        cycle = _after_two_steps()
        before = {number: master.clone() for number, master in _masters(cycle).items()}
        change(cycle)
        with pytest.raises(LayoutError, match=says):
            cycle.optimizer.step()
        for number, master in _masters(cycle).items():
            assert_bytes_equal(master, before[number], what=name)


# Models that were built for something else


def _build(installed: str | None, optimizer: str, settings: dict[str, Any], knobs: Any) -> Any:
    """Build a model of two layers, and an optimizer; return the optimizer."""

    import moe_optim

    moe_optim.uninstall()
    config = MoEOptimConfig(format="mxfp8" if installed else "bf16", **knobs)
    if installed in ("adam", "muon"):
        moe_optim.install(config, optimizer=installed)
    transformer = layer_config(life_cycle.WIDTH)
    layers = life_cycle.make_layers("mxfp8" if installed else "bf16")
    ddp = wrap(transformer, life_cycle.make_model(transformer, layers))
    return build_optimizer(ddp, optimizer=optimizer, lr=0.01, **settings)


BAD: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "wrapped for Adam": (
        ("adam", "muon", {}, {}),
        StateError,
        r'expected adam, which moe_optim is installed for .* got muon\. .* optimizer="muon"\)',
    ),
    "nothing installed": (
        (None, "muon", {}, {}),
        StateError,
        r'expected moe_optim\.install\(config, optimizer="muon"\), got an .* or none',
    ),
    "wrapped for Muon": (
        ("muon", "adam", {}, {}),
        StateError,
        r'expected muon, which moe_optim is installed for .* got adam\. .* optimizer="adam"\)',
    ),
    "a factor of zero": (
        ("muon", "muon", {"muon_extra_scale_factor": 0.0}, {}),
        ConfigError,
        r"--muon-extra-scale-factor 0\.0: expected a positive, finite number",
    ),
}


@life_cycle.on_a_rank
def test_a_model_that_muon_cannot_train_is_refused_when_its_optimizer_is_built():
    for arguments, kind, says in BAD.values():
        with pytest.raises(kind, match=says):
            _build(*arguments)
    optimizer = _build("muon", "muon", {}, {})
    assert [type(part).__name__ for part in optimizer.chained_optimizers] == [
        "MuonDistributedOptimizer"
    ]


@life_cycle.on_a_rank
def test_mup_leaves_the_learning_rates_of_all_matrices_alone():
    """Those of experts, which are one parameter, included; Megatron scales what Adam steps."""
    from megatron.core.optimizer import OptimizerConfig, get_mup_config_overrides

    import moe_optim

    cycle = life_cycle.LifeCycle(optimizer="muon and adam")
    flags = OptimizerConfig(
        optimizer="muon", lr=0.5, min_lr=0.25, bf16=True, use_distributed_optimizer=True
    )
    overrides = get_mup_config_overrides(flags, 4.0, flags.optimizer)
    optimizer = moe_optim.get_megatron_optimizer(flags, [cycle.ddp], overrides)
    rates = {
        tuple(param.shape): (group["max_lr"], group["min_lr"])
        for part in optimizer.chained_optimizers
        for params, group in zip(part.model_float16_groups, part.param_groups, strict=True)
        for param in params
    }
    assert rates == {(3, 32, 32): (0.5, 0.25), (32, 32): (0.125, 0.0625)}
