"""Whatever Megatron's or torch's step would read anew, a fused step reads anew, or refuses by name.

Each case changes something after two steps and takes a third. Twins are runs that had it so from
the beginning, or were given the same values in place: they end with the same bytes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_optim.errors import ConfigError, StateError
from moe_optim.optimizer.adam import GroupStepAdam
from tests.optimizer.test_nonfinite import _snapshot
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.states import life_cycle

Change = Callable[[life_cycle.LifeCycle], Any]
DENSE, LAST = 1, 2  # the last layer has an optimizer of its own, and a norm


def _parts(cycle: life_cycle.LifeCycle) -> list[Any]:
    return list(cycle.optimizer.chained_optimizers)


def _masters(cycle: life_cycle.LifeCycle) -> dict[int, torch.Tensor]:
    """Return the masters by the number of their layer; one rank owns all of each."""
    owned = [found for part in _parts(cycle) for found in cycle._masters_of(part)]
    return {number: master for number, _, master in owned}


def _part_of(cycle: life_cycle.LifeCycle, number: int) -> Any:
    return _parts(cycle)[number == LAST]


def _backward(cycle: life_cycle.LifeCycle, seed: int) -> None:
    cycle.zero()
    cycle.micro(seed, last=True)


def _after_two_steps(step: str = "fused") -> life_cycle.LifeCycle:
    """Return a model that has taken two steps and holds gradients for a third."""
    cycle = life_cycle.LifeCycle(step=step)
    for seed in (1, 2):
        _backward(cycle, seed)
        cycle.optimizer.step()
    _backward(cycle, 3)
    return cycle


def _third_step(change: Change, step: str = "fused") -> tuple[dict[str, torch.Tensor], Any]:
    """Return all states and weights after a change and a third step, and what that returned."""
    cycle = _after_two_steps(step)
    change(cycle)
    result = cycle.optimizer.step()
    return _snapshot([cycle.ddp], cycle.optimizer), result


# Gradients


def _write_gradients(cycle: life_cycle.LifeCycle) -> None:
    for param in cycle.params:
        param.main_grad.mul_(0.5)


def _replace_gradients(cycle: life_cycle.LifeCycle) -> None:
    for param in cycle.params:
        param.main_grad = param.main_grad * 0.5


def _replace_one_gradient_at_its_place(cycle: life_cycle.LifeCycle) -> None:
    """Of other elements of the same memory, the first at the same address."""
    _write_gradients(cycle)
    for param in cycle.params:
        param.main_grad = param.main_grad.view_as(param.main_grad)


def _exchange_gradients(cycle: life_cycle.LifeCycle) -> None:
    for param in cycle.params:
        param.main_grad.data = param.main_grad.data * 0.5


@life_cycle.on_a_rank
def test_a_gradient_is_the_tensor_that_main_grad_is_now():
    """Whether the attribute was given another tensor, or the tensor other memory."""
    untouched, (expected, result) = _third_step(lambda _: None)[0], _third_step(_write_gradients)
    assert any(not torch.equal(untouched[name], of) for name, of in expected.items())
    for way in (_replace_gradients, _replace_one_gradient_at_its_place, _exchange_gradients):
        got, of_way = _third_step(way)
        assert_same_tensors(got, expected, what=way.__name__)
        assert [float(of or 0) for of in of_way] == [float(of or 0) for of in result]


def _take_away(cycle: life_cycle.LifeCycle) -> None:
    cycle.params[DENSE].main_grad = None


def _cut(cycle: life_cycle.LifeCycle) -> None:
    cycle.params[DENSE].main_grad = cycle.params[DENSE].main_grad[:-1]


# Groups and modes


def _move_to_a_group_that_rests(cycle: life_cycle.LifeCycle) -> None:
    part = _part_of(cycle, 0)
    inner, master = part.optimizer, _masters(cycle)[0]
    (home,) = [group for group in inner.param_groups if any(master is p for p in group["params"])]
    home["params"] = [one for one in home["params"] if one is not master]
    inner.param_groups.append({**home, "params": [master], "lr": 0.0})


@life_cycle.on_a_rank
def test_a_master_has_the_rate_of_the_group_that_it_is_in_now():
    """Also of a group that was appended; all moments, and other masters, are as without."""
    cycle = _after_two_steps()
    before = {number: master.clone() for number, master in _masters(cycle).items()}
    _move_to_a_group_that_rests(cycle)
    cycle.optimizer.step()
    after = _masters(cycle)
    assert_bytes_equal(after[0], before[0], what="a master of rate 0")
    whole = _third_step(lambda _: None)[0]
    moved = _third_step(_move_to_a_group_that_rests)[0]
    same = {name for name, of in whole.items() if torch.equal(of, moved[name])}
    assert {name for name in whole if name.startswith("exp_avg")} <= same
    assert not torch.equal(after[DENSE], before[DENSE])


def _couple(cycle: life_cycle.LifeCycle) -> None:
    for part in _parts(cycle):
        for group in part.optimizer.param_groups:
            group["adam_w_mode"] = False


def _assert_first_moments(
    change: Change, factor: Callable[[int, list[float]], float], decay: float = 0.0
) -> int:
    """Compare the first moments after a change and a step with what they follow from, in fp64.

    Args:
        change: before the step.
        factor: of a gradient, given its layer and the norms of all layers.
        decay: of the master, added to the gradient.
    """
    cycle = _after_two_steps()
    change(cycle)
    gradients = [param.main_grad.detach().double().view(-1) for param in cycle.params]
    norms = [float(gradient.norm()) for gradient in gradients]
    masters = _masters(cycle)
    states = {number: _part_of(cycle, number).optimizer.state for number in masters}
    want = {}
    for number, master in masters.items():
        moment = states[number][master]["exp_avg"].double()
        added = gradients[number] * factor(number, norms) + decay * master.detach().double()
        want[number] = (0.9 * moment + 0.1 * added).float()
    cycle.optimizer.step()
    for number, master in masters.items():
        found = states[number][master]["exp_avg"]
        torch.testing.assert_close(found, want[number], rtol=1e-4, atol=1e-6)
    return len(want)


@life_cycle.on_a_rank
def test_weight_decay_is_coupled_from_the_step_on_that_says_so():
    """Moments hold the decay then, and did not before."""
    decoupled = _assert_first_moments(lambda _: None, lambda *_: 1.0)
    assert (
        decoupled + _assert_first_moments(_couple, lambda *_: 1.0, decay=life_cycle.WEIGHT_DECAY)
        == 6
    )


# Norms


def _norm_without(cycle: life_cycle.LifeCycle, left_out: int) -> float:
    """Return the main norm, fp64; the last layer has one of its own."""
    rest = [cycle.params[number] for number in (0, DENSE) if number != left_out]
    return math.sqrt(sum(float(param.main_grad.double().square().sum()) for param in rest))


def _regroup(cycle: life_cycle.LifeCycle) -> None:
    _masters(cycle)[DENSE].grad_norm_group = "mtp"


def _share(cycle: life_cycle.LifeCycle) -> None:
    _masters(cycle)[DENSE].shared = True


@life_cycle.on_a_rank
def test_a_gradient_counts_where_its_master_says_now():
    """In a norm of its own, or in none where a parameter is shared; and never twice."""
    for change in (_regroup, _share):
        cycle = _after_two_steps()
        want = _norm_without(cycle, DENSE)
        assert want < 0.9 * _norm_without(cycle, -1)
        change(cycle)
        assert float(cycle.optimizer.step()[1]) == pytest.approx(want, rel=1e-6)


def _clip(limit: float) -> Change:
    def change(cycle: life_cycle.LifeCycle) -> None:
        for part in _parts(cycle):
            part.config.clip_grad = limit

    return change


@life_cycle.on_a_rank
def test_clipping_thresholds_and_counts_are_those_of_the_configuration_now():
    """Of every optimizer of the chain its own."""

    def main_norm(norms: list[float]) -> float:
        return math.hypot(norms[0], norms[DENSE])

    def clipped(number: int, norms: list[float]) -> float:
        return 0.25 / (norms[LAST] if number == LAST else main_norm(norms))

    def clip_last_alone(cycle: life_cycle.LifeCycle) -> None:
        _parts(cycle)[-1].config = replace(_parts(cycle)[-1].config, clip_grad=0.25)

    assert _assert_first_moments(_clip(0.25), clipped) == 3
    assert _assert_first_moments(clip_last_alone, lambda n, of: clipped(n, of) if n == LAST else 1)

    def threshold(cycle: life_cycle.LifeCycle) -> None:
        _parts(cycle)[-1].config.grad_norm_skip_threshold = 1e-6

    def zeros(cycle: life_cycle.LifeCycle) -> None:
        _parts(cycle)[0].config.log_num_zeros_in_grad = True
        cycle.params[DENSE].main_grad.view(-1)[:7] = 0.0

    cycle = _after_two_steps()
    gradients = [param.main_grad for param in cycle.params]
    there = sum(int((one == 0).sum()) for one in gradients)
    there -= int((gradients[DENSE].view(-1)[:7] == 0).sum())
    assert _third_step(threshold)[1][0] is False
    assert _third_step(zeros)[1][2] == there + 7


# Masters


def _replace_masters(cycle: life_cycle.LifeCycle) -> None:
    """Give everything that knows a master another tensor of the same values."""
    for part in _parts(cycle):
        new = {}
        for groups in (part.shard_fp32_from_float16_groups, part.shard_fp32_groups):
            for of_group in groups:
                for index, master in enumerate(of_group):
                    new[master] = of_group[index] = master.detach().clone()
                    vars(new[master]).update(vars(master))
        for group in part.optimizer.param_groups:
            group["params"] = [new[master] for master in group["params"]]
        for master, copied in new.items():
            part.optimizer.state[copied] = part.optimizer.state.pop(master)
            master.data.fill_(torch.nan)


@life_cycle.on_a_rank
def test_masters_are_the_tensors_that_megatron_holds_now():
    replaced, kept = _third_step(_replace_masters), _third_step(lambda _: None)
    assert_same_tensors(replaced[0], kept[0], what="other masters")


# What is refused


def _drop_from_its_group(cycle: life_cycle.LifeCycle) -> None:
    for group in _part_of(cycle, DENSE).optimizer.param_groups:
        group["params"] = group["params"][:-1]


def _list_twice(cycle: life_cycle.LifeCycle) -> None:
    group = _part_of(cycle, DENSE).optimizer.param_groups[0]
    group["params"] = [*group["params"], group["params"][0]]


def _add_a_stranger(cycle: life_cycle.LifeCycle) -> None:
    group = _part_of(cycle, DENSE).optimizer.param_groups[0]
    group["params"] = [*group["params"], torch.nn.Parameter(torch.ones(3))]


def _couple_half(cycle: life_cycle.LifeCycle) -> None:
    _move_to_a_group_that_rests(cycle)
    _part_of(cycle, 0).optimizer.param_groups[-1]["adam_w_mode"] = False


def _wrap_step(cycle: life_cycle.LifeCycle) -> None:
    inner = _part_of(cycle, 0).optimizer
    take = inner.step
    inner.step = lambda *given: take(*given)


def _replace_step_of_the_class(cycle: life_cycle.LifeCycle) -> None:
    GroupStepAdam.step = lambda self: None


def _replace_adam(cycle: life_cycle.LifeCycle) -> None:
    part = _part_of(cycle, 0)
    part.optimizer = torch.optim.SGD(part.get_parameters(), lr=0.1)


def _scale_losses(cycle: life_cycle.LifeCycle) -> None:
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    _part_of(cycle, 0).grad_scaler = ConstantGradScaler(8.0)


def _replace_grad_in_a_hook(cycle: life_cycle.LifeCycle) -> None:
    def hook(inner: Any, *_: Any) -> None:
        for group in inner.param_groups:
            for master in group["params"]:
                master.grad = torch.zeros_like(master)

    _part_of(cycle, 0).optimizer.register_step_pre_hook(hook)


def _give_step_a_closure(cycle: life_cycle.LifeCycle) -> None:
    inner = _part_of(cycle, 0).optimizer
    inner.register_step_pre_hook(lambda one, args, kwargs: ((one, lambda: 1.0), kwargs))


def _ascend(cycle: life_cycle.LifeCycle) -> None:
    _part_of(cycle, 0).optimizer.param_groups[0]["maximize"] = True


REFUSED: dict[str, tuple[Change, str]] = {
    "no gradient": (_take_away, r"dense\.weight: expected main_grad of 1024 elements, got none"),
    "a smaller gradient": (_cut, r"main_grad of 1024 elements, got \[31, 32\]"),
    "a master in no group": (_drop_from_its_group, "got 1 in none, 0 once more, and 0 other"),
    "a master twice": (_list_twice, "got 0 in none, 1 once more, and 0 other"),
    "a stranger": (_add_a_stranger, "got 0 in none, 0 once more, and 1 other"),
    "two modes": (_couple_half, "expected one adam_w_mode in all parameter groups"),
    "a wrapped step": (_wrap_step, "expected the GroupStepAdam that was built, with its own step"),
    "another step": (_replace_step_of_the_class, "got another optimizer or another function"),
    "another optimizer": (_replace_adam, "got another optimizer or another function"),
    "a loss scale": (_scale_losses, "expected no loss scale, .* got a ConstantGradScaler"),
    "another grad": (_replace_grad_in_a_hook, "pre-hooks to change gradients in place"),
    "a closure": (_give_step_a_closure, "expected a step pre-hook to return None"),
    "ascent": (_ascend, "parameter groups: maximize: expected False, .*, got True"),
}


@life_cycle.on_a_rank
def test_what_a_fused_step_cannot_read_is_refused_before_a_master_moves():
    stock = GroupStepAdam.step
    for name, (change, says) in REFUSED.items():
        cycle = _after_two_steps()
        masters = _masters(cycle)
        before = {number: master.clone() for number, master in masters.items()}
        change(cycle)
        with pytest.raises((StateError, ConfigError), match=f"(?s:^optimizer( step)?: .*){says}"):
            cycle.optimizer.step()
        GroupStepAdam.step = stock
        for number in (0, DENSE):
            assert_bytes_equal(masters[number], before[number], what=name)
