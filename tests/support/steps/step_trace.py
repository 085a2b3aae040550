"""What goes into every optimizer step of a run and what comes out of it, seen on one rank."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.steps.fused_steps import owned as owned_shards
from tests.support.steps.fused_steps import owned_range
from tests.support.training import named_parameters, weight_bytes

Tensors = dict[str, torch.Tensor]
"""Copies, by the name of their parameter. Shards are flat fp32 and what this rank owns."""


@dataclass
class Step:
    """One step: what Megatron had decided when it began, and the state it left."""

    weights: Tensors  # whole, as bytes: those that the gradients were computed with
    grads: Tensors  # shards of main_grad, reduced and not clipped
    lr: dict[str, float]
    weight_decay: dict[str, float]
    grad_norm: float = float("nan")
    masters: Tensors = field(default_factory=dict)
    exp_avg: Tensors = field(default_factory=dict)
    exp_avg_sq: Tensors = field(default_factory=dict)


@dataclass
class Trace:
    """All steps of a run."""

    shapes: dict[str, tuple[int, ...]]  # of whole parameters
    starts: dict[str, int] = field(default_factory=dict)  # where in the parameter a shard begins
    masters: Tensors = field(default_factory=dict)  # before the first step
    steps: list[Step] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)  # after the last step, whole, as bytes


def trace_steps(model: list[Any], optimizer: Any) -> Trace:
    """Return a trace that fills while ``optimizer``, which has not stepped yet, is used."""
    names = {param: name for name, param in named_parameters(model)}
    trace = Trace(shapes={name: tuple(param.shape) for param, name in names.items()})
    for param, master, _, part in owned_shards(optimizer):
        trace.starts[names[param]] = owned_range(part, param).start
        trace.masters[names[param]] = master.detach().clone()
    stock_step = optimizer.step

    def step() -> Any:
        now = Step(weights=whole_weights(model), grads={}, lr={}, weight_decay={})
        for param, _, group, part in owned_shards(optimizer):
            name, owned = names[param], owned_range(part, param)
            now.grads[name] = param.main_grad.view(-1)[owned].clone()
            now.lr[name], now.weight_decay[name] = group["lr"], group["weight_decay"]
        result = stock_step()
        _, now.grad_norm, _ = result
        for param, master, _, part in owned_shards(optimizer):
            name, moments = names[param], part.optimizer.state[master]
            now.masters[name] = master.detach().clone()
            now.exp_avg[name] = moments["exp_avg"].clone()
            now.exp_avg_sq[name] = moments["exp_avg_sq"].clone()
        trace.steps.append(now)
        return result

    optimizer.step = step
    return trace


def whole_weights(model: list[Any]) -> Tensors:
    """Return the bytes of all weights as they lie there, under the names of ``weight_bytes``."""
    found = {}
    for name, param in named_parameters(model):
        found |= weight_bytes(name, param)
    return found
