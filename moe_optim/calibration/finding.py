"""Amaxes of weights, and of inputs while a loop runs the model, reduced over ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from moe_optim.calibration.linears import ExpertLinear
from moe_optim.errors import LayoutError, NonFiniteError
from moe_optim.formats.reference.amax import expert_amax_into
from moe_optim.integration.agreement import agree

_NONE = -1.0
"""Amax of no number on this rank; less than any other."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundAmax:
    """Amaxes of the weights or of the inputs of a linear."""

    linear: ExpertLinear
    amax: Tensor
    """Amaxes, fp32: [E] for local experts, or [1] for all experts or for inputs."""


def find_weight_amaxes(
    linears: Sequence[ExpertLinear], axis: Literal[0, "rank"] | None
) -> list[FoundAmax]:
    """Return the amaxes of weights, see :func:`moe_optim.calibrate`. Every rank must call it.

    Raises:
        StateError: weights are stale or offloaded.
        NonFiniteError: an expert contains Inf, or only NaN; on all ranks.
    """
    found: list[FoundAmax] = agree(lambda: [_find(linear) for linear in linears], None)
    _reduce(found, "expt_tp", "expt_dp")
    agree(lambda: _require_numbers(found), None)
    if axis == "rank":
        return [replace(one, amax=one.amax.amax().expand_as(one.amax).clone()) for one in found]
    if axis is None:
        found = [replace(one, amax=one.amax.amax().view(1)) for one in found]
        _reduce(found, "ep")
    return found


def find_input_amaxes(
    chunks: Sequence[Module], linears: Sequence[ExpertLinear], forward_loop: Callable[[Any], object]
) -> list[FoundAmax]:
    """Run a loop in evaluation mode, and return the amax of the inputs of each linear.

    Every rank must call it. The loop gets the chunk, or the list of several.

    Raises:
        NonFiniteError: an input is NaN or Inf; on all ranks.
        LayoutError: a linear got no input on any rank; on all ranks.
    """
    found = []
    for linear in linears:
        device = linear.weights()[0].device
        amax = torch.full((1,), _NONE, dtype=torch.float32, device=device)
        found.append(FoundAmax(linear=linear, amax=amax))
    agree(lambda: _run(chunks, found, forward_loop), None)
    agree(lambda: _require_finite_inputs(found), None)
    _reduce(found, "ep", "expt_tp", "expt_dp")
    agree(lambda: _require_inputs(found), None)
    return found


def _run(
    chunks: Sequence[Module], found: Sequence[FoundAmax], forward_loop: Callable[[Any], object]
) -> None:
    with ExitStack() as stack:
        for one in found:
            hook = one.linear.module.register_forward_pre_hook(_observer(one.amax))
            stack.callback(hook.remove)
        stack.enter_context(_evaluating(chunks))
        forward_loop(chunks[0] if len(chunks) == 1 else list(chunks))


def _observer(amax: Tensor) -> Callable[[Module, tuple[Any, ...]], None]:
    def observe(_: Module, args: tuple[Any, ...]) -> None:
        if args and args[0].numel():  # compiled graphs call hooks without arguments
            least, largest = torch.aminmax(args[0].detach())
            amax.copy_(torch.maximum(amax, torch.maximum(-least, largest).float()))

    return observe


@contextmanager
def _evaluating(chunks: Sequence[Module]) -> Iterator[None]:
    trained = [module for chunk in chunks for module in chunk.modules() if module.training]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _find(linear: ExpertLinear) -> FoundAmax:
    amaxes = []
    for values in linear.values():
        amax = torch.zeros(1, dtype=torch.float32, device=values.device)
        expert_amax_into(amax, values, 0, values.numel())
        amaxes.append(torch.where(values.isnan().all(), _NONE, amax))
    return FoundAmax(linear=linear, amax=torch.cat(amaxes))


def _reduce(found: Sequence[FoundAmax], *names: str) -> None:
    by_groups: dict[Any, list[FoundAmax]] = {}
    for one in found:
        groups = tuple(getattr(one.linear.groups, name) for name in names)
        by_groups.setdefault(groups, []).append(one)
    for groups, members in by_groups.items():
        amaxes = [one.amax for one in members]
        together = torch.cat(amaxes)
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(amaxes, together.split([len(amax) for amax in amaxes]))


def _require_numbers(found: Sequence[FoundAmax]) -> None:
    faults = []
    for one in found:
        first = one.linear.groups.ep.rank() * one.linear.num_experts
        for index, amax in enumerate(one.amax.tolist()):
            if not 0 <= amax < torch.inf:
                what = "no number" if amax < 0 else "Inf"
                faults.append(f"{one.linear.name}: expert {first + index}: {what}")
    if faults:
        raise NonFiniteError(
            f"calibrate: expected finite weights, got {len(faults)} expert(s) without:\n  "
            + "\n  ".join(faults)
            + "\nNothing was stored. Load an earlier checkpoint, or find what wrote them."
        )


def _require_finite_inputs(found: Sequence[FoundAmax]) -> None:
    faults = [one.linear.name for one in found if not one.amax.isfinite().all()]
    if faults:
        raise NonFiniteError(
            "calibrate: forward_loop: expected finite inputs, got NaN or Inf in those of "
            f"{', '.join(faults)}. Nothing was stored. Look at the first of these layers, and at "
            "the data."
        )


def _require_inputs(found: Sequence[FoundAmax]) -> None:
    unseen = [one.linear.name for one in found if one.amax.item() == _NONE]
    if unseen:
        raise LayoutError(
            "calibrate: forward_loop: expected inputs of every selected linear, got none on any "
            f"rank for {', '.join(unseen)}. Run the whole model on some tokens, without "
            "torch.compile, CUDA graphs and Transformer Engine's op fuser, which call no hooks."
        )
