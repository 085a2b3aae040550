"""What a step of Muon reads anew, what hooks and policies do to it, and what it refuses by name.

Small models under the real DDP and optimizer; see ``tests/support/states/life_cycle.py``. Twins are
runs that were given the same values in place: they end with the same bytes.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError, StateError
from moe_optim.optimizer.muon import Muon
from tests.optimizer.test_nonfinite import _snapshot
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states import life_cycle
from tests.support.states.masters import assert_weights_come_from_masters

Change = Callable[[life_cycle.LifeCycle], Any]
DENSE = 1


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


def _halve(cycle: life_cycle.LifeCycle) -> None:
    for param in cycle.params:
        param.main_grad.mul_(0.5)


def _replace_gradients(cycle: life_cycle.LifeCycle) -> None:
    for param in cycle.params:
        param.main_grad = param.main_grad * 0.5


def _give_gradients_other_memory(cycle: life_cycle.LifeCycle) -> None:
    for param in cycle.params:
        param.main_grad.data = param.main_grad.data * 0.5


def _halve_in_a_hook(cycle: life_cycle.LifeCycle) -> None:
    def hook(inner: Any, *_: Any) -> None:
        for group in inner.param_groups:
            for master in group["params"]:
                master.grad.mul_(0.5)

    for inner in _inners(cycle):
        inner.register_step_pre_hook(hook)


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
    "main_grad is another tensor": (_replace_gradients, _halve),
    "main_grad has other memory": (_give_gradients_other_memory, _halve),
    "a pre-hook writes gradients": (_halve_in_a_hook, _halve),
    "gradients are clipped": (_clip, _clip_in_place),
    "momentum is gone": (_lose_momentum, _zero_momentum),
}


def _assert_all_twins() -> int:
    life_cycle.initialize()
    unchanged, _ = _third_step(lambda _: None)
    for name, (change, twin) in TWINS.items():
        got, (_, norm, _) = _third_step(change)
        expected, (_, norm_of_twin, _) = _third_step(twin)
        assert_same_tensors(got, expected, what=name)
        assert any(not torch.equal(unchanged[key], of) for key, of in got.items()), name
        if change is not _clip and change is not _halve_in_a_hook:  # norms of unclipped gradients
            assert norm == norm_of_twin, name
    return len(TWINS)


def test_a_step_reads_what_is_there_now():
    """Gradients, momentum and thresholds that were exchanged give the bits of those that were
    written in place."""
    assert run_ranks(1, _assert_all_twins) == [len(TWINS)]


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


def _step_with_rates_of_both() -> None:
    life_cycle.initialize()
    for step in ("fused", "stock"):
        _step_with_rates(step)


def test_a_matrix_has_the_rates_of_the_group_that_it_is_in_now():
    """Learning rate, momentum and decay may change at any step, to zero, too; so may the group."""
    run_ranks(1, _step_with_rates_of_both)


# Hooks, policies and counts


def _write_masters_in_a_hook() -> None:
    life_cycle.initialize()
    cycle = _after_two_steps()

    def hook(inner: Any, *_: Any) -> None:
        for group in inner.param_groups:
            for master in group["params"]:
                master.data.mul_(2)

    for inner in _inners(cycle):
        inner.register_step_post_hook(hook)
    plain = _after_two_steps()
    plain.optimizer.step()
    cycle.optimizer.step()
    cycle.ddp.start_param_sync(force_sync=True)
    assert_weights_come_from_masters([cycle.ddp], cycle.optimizer)
    for number, master in _masters(cycle).items():
        assert_bytes_equal(master, _masters(plain)[number] * 2, what=f"layer {number}")
    dense = cycle.params[DENSE].detach().flatten()
    assert_bytes_equal(dense, _masters(cycle)[DENSE].bfloat16(), what="dense weight")


def test_weights_are_those_of_masters_that_a_post_hook_wrote():
    run_ranks(1, _write_masters_in_a_hook)


def _skip_steps(step: str) -> int:
    """Return how many steps were skipped; each is followed by one that trains."""
    life_cycle.initialize()
    skipped = 0
    for number in range(3):
        cycle = _after_two_steps(step)
        cycle.optimizer.policy = "skip"
        before = _snapshot([cycle.ddp], cycle.optimizer)
        cycle.params[number].main_grad.view(-1)[7] = torch.nan
        moved, *_ = cycle.optimizer.step()
        assert not moved
        assert_same_tensors(_snapshot([cycle.ddp], cycle.optimizer), before, what="skipped")
        cycle.zero()
        cycle.micro(4, last=True)
        cycle.step()
        cycle.check()
        skipped += 1
    return skipped


@pytest.mark.parametrize("step", ["fused", "stock"])
def test_a_skipped_step_leaves_momentum_alone(step: str):
    """A NaN in any layer stops all of them, and the next step is as if there had been none."""
    assert run_ranks(1, _skip_steps, step) == [3]


def _count_zeros() -> list[tuple[int, int]]:
    life_cycle.initialize()
    counts = []
    for step in ("fused", "stock"):
        cycle = _after_two_steps(step)
        for part in cycle.parts:
            part.config.log_num_zeros_in_grad = True
        for param in cycle.params:
            param.main_grad.view(-1)[:100] = 0
        wanted = sum(int((param.main_grad == 0).sum()) for param in cycle.params)
        counts.append((int(cycle.optimizer.step()[2]), wanted))
    return counts


def test_zeros_in_gradients_of_matrices_are_counted():
    for got, wanted in run_ranks(1, _count_zeros)[0]:
        assert got == wanted >= 300


# What is refused


def _shorten_momentum(cycle: life_cycle.LifeCycle) -> None:
    state = next(iter(_inners(cycle)[0].state.values()))
    state["momentum_buffer"] = state["momentum_buffer"][:-1]


def _narrow_momentum(cycle: life_cycle.LifeCycle) -> None:
    state = next(iter(_inners(cycle)[0].state.values()))
    state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def _cut_gradient(cycle: life_cycle.LifeCycle) -> None:
    cycle.params[DENSE].main_grad = cycle.params[DENSE].main_grad[1:]


def _leave_group(cycle: life_cycle.LifeCycle) -> None:
    _inners(cycle)[0].param_groups[0]["params"].pop()


def _replace_step(cycle: life_cycle.LifeCycle) -> None:
    _inners(cycle)[0].step = lambda: None


def _replace_optimizer(cycle: life_cycle.LifeCycle) -> None:
    part = cycle.parts[0]
    part.optimizer = torch.optim.SGD(part.get_parameters(), lr=0.1)


def _scale_losses(cycle: life_cycle.LifeCycle) -> None:
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    cycle.parts[0].grad_scaler = ConstantGradScaler(8.0)


REFUSED: dict[str, tuple[Change, type[Exception], str]] = {
    "momentum of another length": (_shorten_momentum, LayoutError, "momentum.*expected"),
    "momentum in bf16": (_narrow_momentum, LayoutError, r"momentum.*expected .*float32.*bfloat16"),
    "a smaller gradient": (_cut_gradient, StateError, r"dense\.weight: expected main_grad of 1024"),
    "a master in no group": (_leave_group, StateError, "got 1 in none, 0 once more, and 0 other"),
    "another step": (_replace_step, StateError, "expected the Muon that was built"),
    "another optimizer": (_replace_optimizer, StateError, "expected the Muon that was built"),
    "a loss scale": (_scale_losses, StateError, "expected no loss scale"),
}


def _refuse_all() -> dict[str, tuple[str, str]]:
    life_cycle.initialize()
    found = {}
    for name, (change, _, _) in REFUSED.items():
        cycle = _after_two_steps()
        before = {number: master.clone() for number, master in _masters(cycle).items()}
        change(cycle)
        with pytest.raises((StateError, LayoutError)) as error:
            cycle.optimizer.step()
        found[name] = type(error.value).__name__, str(error.value)
        for number, master in _masters(cycle).items():
            assert_bytes_equal(master, before[number], what=name)
    return found


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[str, str]]:
    (found,) = run_ranks(1, _refuse_all)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_cannot_use_is_refused_before_a_master_moves(refusals, name):
    _, kind, pattern = REFUSED[name]
    got, message = refusals[name]
    assert got == kind.__name__
    assert re.search(pattern, message), message


def test_muon_takes_no_closure():
    inner = Muon(
        [torch.nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9, weight_decay=0.0, make_stock=None
    )
    with pytest.raises(ConfigError, match=r"Muon\.step: expected no closure, got one\. Call step"):
        inner.step(lambda: 0.0)


# Models that were built for something else


def _build(installed: str | None, optimizer: str, settings: dict[str, Any], knobs: Any) -> Any:
    """Build a model of two layers, and an optimizer; return the optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    import moe_optim

    moe_optim.uninstall()
    config = MoEOptimConfig(format="mxfp8" if installed else "bf16", **knobs)
    if installed in ("adam", "muon"):
        moe_optim.install(config, optimizer=installed)
    width = life_cycle.WIDTH
    transformer = TransformerConfig(
        num_layers=1, hidden_size=width, num_attention_heads=1, bf16=True
    )
    layers = life_cycle.make_layers("mxfp8" if installed else "bf16")
    ddp = DistributedDataParallel(
        transformer,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        life_cycle.make_model(transformer, layers),
    )
    return moe_optim.get_megatron_optimizer(
        OptimizerConfig(
            optimizer=optimizer,
            lr=0.01,
            bf16=True,
            use_distributed_optimizer=True,
            **settings,
        ),
        [ddp],
    )


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
    "momentum above 1": (
        ("muon", "muon", {"muon_momentum": 1.5}, {}),
        ConfigError,
        r"--muon-momentum 1\.5: expected 0 or more, and less than 1",
    ),
    "a factor of zero": (
        ("muon", "muon", {"muon_extra_scale_factor": 0.0}, {}),
        ConfigError,
        r"--muon-extra-scale-factor 0\.0: expected a positive, finite number",
    ),
    "another mode": (
        ("muon", "muon", {"muon_tp_mode": "sliced"}, {}),
        ConfigError,
        "--muon-tp-mode sliced: expected blockwise, duplicated or distributed",
    ),
}


def _build_all() -> dict[str, tuple[str, str]]:
    life_cycle.initialize()
    found = {}
    for name, (arguments, kind, _) in BAD.items():
        with pytest.raises(kind) as error:
            _build(*arguments)
        found[name] = type(error.value).__name__, str(error.value)
    optimizer = _build("muon", "muon", {}, {})
    assert [type(part).__name__ for part in optimizer.chained_optimizers] == [
        "MuonDistributedOptimizer"
    ]
    return found


@pytest.fixture(scope="module")
def bad_models() -> dict[str, tuple[str, str]]:
    (found,) = run_ranks(1, _build_all)
    return found


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_muon_cannot_train_is_refused_when_its_optimizer_is_built(bad_models, name):
    _, kind, pattern = BAD[name]
    got, message = bad_models[name]
    assert got == kind.__name__
    assert re.search(pattern, message), message
