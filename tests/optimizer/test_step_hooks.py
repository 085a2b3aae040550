"""Hooks around the step of Megatron's Adam are called by a fused step as torch calls them."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from moe_optim.errors import StateError
from moe_optim.optimizer.chained import GraphedStep
from tests.optimizer.test_nonfinite import _snapshot
from tests.optimizer.test_read_anew import (
    DENSE,
    LAST,
    _after_two_steps,
    _backward,
    _masters,
    _part_of,
    _third_step,
)
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.states import life_cycle
from tests.support.states.masters import assert_weights_come_from_masters

CYCLE = life_cycle.LifeCycle


def _note_calls(step: str) -> list[tuple[str, int, int, int]]:
    """Return which hooks were called, of which part, with how many arguments, at which count."""
    cycle, calls = _after_two_steps(step), list[tuple[str, int, int, int]]()
    inners = [part.optimizer for part in cycle.optimizer.chained_optimizers]

    def hook(name: str) -> Any:
        def note(inner: Any, args: Any, kwargs: Any) -> None:
            (given,) = args
            assert given is inner and kwargs == {}
            number = [one is inner for one in inners].index(True)
            calls.append((name, number, len(args), inner.param_groups[0]["step"]))

        return note

    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(hook("global before")),
        torch_optimizer.register_optimizer_step_post_hook(hook("global after")),
    ]
    for inner in inners:
        inner.register_step_pre_hook(hook("before"))
        inner.register_step_post_hook(hook("after"))
    cycle.optimizer.step()
    for handle in handles:
        handle.remove()
    cycle.params[DENSE].grad = None
    _backward(cycle, 4)
    cycle.params[DENSE].main_grad.fill_(torch.nan)
    cycle.optimizer.policy = "skip"
    assert cycle.optimizer.step()[0] is False
    return calls


@life_cycle.on_a_rank
def test_hooks_are_called_in_torchs_order_with_its_arguments():
    """Those of all optimizers, too; before the step counts, and after it. None of a step that is
    skipped."""
    stock, fused = [_note_calls(step) for step in ("stock", "fused")]
    assert len(stock) == 8
    assert fused == stock


def _halve(inner: Any, *_: Any) -> None:
    for group in inner.param_groups:
        for master in group["params"]:
            master.grad.mul_(0.5)


def _hook_halves(cycle: CYCLE) -> None:
    for part in cycle.optimizer.chained_optimizers:
        part.optimizer.register_step_pre_hook(_halve)


def _halves(cycle: CYCLE) -> None:
    for param in cycle.params:
        param.main_grad.mul_(0.5)


def _clips(cycle: CYCLE) -> None:
    for part in cycle.optimizer.chained_optimizers:
        part.config.clip_grad = 0.25


@life_cycle.on_a_rank
def test_pre_hooks_see_clipped_gradients_and_what_they_change_is_stepped():
    """Looking at them changes no bit, and no master keeps one."""
    hooked, by_hand = _third_step(_hook_halves), _third_step(_halves)
    assert_same_tensors(hooked[0], by_hand[0], what="halved")
    assert float(hooked[1][1]) == 2 * float(by_hand[1][1])  # of before the hook, as Megatron's
    cycle = _after_two_steps()
    _clips(cycle)
    seen: dict[int, torch.Tensor] = {}

    def look(inner: Any, *_: Any) -> None:
        masters = _masters(cycle).items()
        mine = {id(one) for group in inner.param_groups for one in group["params"]}
        seen.update({n: one.grad.clone() for n, one in masters if id(one) in mine})

    for part in cycle.optimizer.chained_optimizers:
        part.optimizer.register_step_pre_hook(look)
    whole = {n: param.main_grad.clone().view(-1) for n, param in enumerate(cycle.params)}
    main = torch.cat([whole[0], whole[DENSE]]).double().norm().float()
    norms = {0: main, DENSE: main, LAST: whole[LAST].double().norm().float()}
    cycle.optimizer.step()
    for number, gradient in whole.items():
        want = gradient * (0.25 / (norms[number] + 1e-6))
        torch.testing.assert_close(seen[number], want, rtol=1e-6, atol=0.0)
    assert all(master.grad is None for master in _masters(cycle).values())
    clipped = _third_step(_clips)[0]
    assert_same_tensors(_snapshot([cycle.ddp], cycle.optimizer), clipped, what="only looked at")


def _shrink(inner: Any, *_: Any) -> None:
    for group in inner.param_groups:
        for master in group["params"]:
            master.data.mul_(0.5)


def _write_masters_in_hooks(overlap: bool) -> int:
    cycle = life_cycle.LifeCycle(step="fused", overlap=overlap)
    for seed in (1, 2):
        _backward(cycle, seed)
        cycle.optimizer.step()
    twin = {n: one.clone() for n, one in _masters(cycle).items()}
    for part in cycle.optimizer.chained_optimizers:
        part.optimizer.register_step_post_hook(_shrink)
    _backward(cycle, 3)
    before = {n: one.clone() for n, one in _masters(cycle).items()}
    cycle.optimizer.step()
    for number, master in _masters(cycle).items():
        assert_bytes_equal(before[number], twin[number])
        assert float(master.norm()) < 0.6 * float(before[number].norm())
    if overlap:
        cycle.ddp.start_param_sync(force_sync=True)
    dense = cycle.params[DENSE].detach().view(-1)
    assert_bytes_equal(dense, _masters(cycle)[DENSE].detach().bfloat16(), what="dense")
    return assert_weights_come_from_masters([cycle.ddp], cycle.optimizer)


@life_cycle.on_a_rank
def test_weights_are_those_of_masters_that_a_post_hook_wrote():
    """By ``data``, of which no version counter tells; gathered in the step and behind it."""
    assert [_write_masters_in_hooks(overlap) for overlap in (False, True)] == [2, 2]


@life_cycle.on_a_rank
def test_pre_hooks_come_before_anything_is_planned():
    """Moments are elsewhere but for steps: a pre-hook brings them, a post-hook takes them away."""
    twin = _after_two_steps()
    twin.optimizer.step()
    cycle = _after_two_steps()
    inners = [part.optimizer for part in cycle.optimizer.chained_optimizers]
    kept: dict[int, Any] = {}

    def take(inner: Any, *_: Any) -> None:
        kept[id(inner)] = copy.deepcopy(list(inner.state.values()))
        for state in inner.state.values():
            state.update({name: of.new_full((), torch.nan).half() for name, of in state.items()})

    def bring(inner: Any, *_: Any) -> None:
        for state, values in zip(inner.state.values(), kept[id(inner)], strict=True):
            state.update(values)

    for inner in inners:
        take(inner)
        inner.register_step_pre_hook(bring)
        inner.register_step_post_hook(take)
    cycle.optimizer.step()
    for inner in inners:
        bring(inner)
    found, want = (_snapshot([one.ddp], one.optimizer) for one in (cycle, twin))
    assert_same_tensors(found, want, what="states that hooks bring")


@life_cycle.on_a_rank
def test_a_step_that_is_captured_calls_post_hooks_and_refuses_pre_hooks():
    """Gradients are clipped inside of the graph, where no hook can see them."""
    cycle = _after_two_steps()
    cycle.optimizer.step = graphed = GraphedStep(cycle.optimizer)
    inner, calls = _part_of(cycle, 0).optimizer, list[int]()
    inner.register_step_post_hook(lambda *_: calls.append(inner.param_groups[0]["step"]))
    graphed()
    graphed.tell()
    assert calls == [3]
    inner.register_step_pre_hook(_halve)
    _backward(cycle, 4)
    before = _masters(cycle)[0].clone()
    with pytest.raises(StateError, match=r"--optimizer-cuda-graph: expected no step pre-hooks"):
        graphed()
    assert_bytes_equal(_masters(cycle)[0], before)
    assert len(calls) == 1
