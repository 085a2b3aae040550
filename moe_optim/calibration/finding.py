"""Amaxes of weights, and of inputs while a loop runs the model, reduced over ranks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from moe_optim.calibration.linears import ExpertLinear
from moe_optim.errors import LayoutError, NonFiniteError
from moe_optim.formats.reference.blocks import expert_amax_into
from moe_optim.integration.agreement import agree

_NONE = -1.0  # amax of no number on this rank; less than any other


def find_weight_amaxes(
    linears: Sequence[ExpertLinear], axis: Literal[0, "rank"] | None
) -> list[Tensor]:
    """Return the amaxes of the weights of each linear, see :func:`moe_optim.calibrate`.

    They are fp32, [E] for the local experts, or [1] for all. Every rank must call it. All raise
    StateError for stale or offloaded weights, NonFiniteError for an expert with Inf, or only NaN.
    """
    amaxes: list[Tensor] = agree(lambda: [_find(linear) for linear in linears], None)
    _reduce(linears, amaxes, "expt_tp", "expt_dp")
    agree(lambda: _require_numbers(linears, amaxes), None)
    if axis == "rank":
        return [amax.amax().expand_as(amax).clone() for amax in amaxes]
    if axis is None:
        amaxes = [amax.amax().view(1) for amax in amaxes]
        _reduce(linears, amaxes, "ep")
    return amaxes


def find_input_amaxes(
    chunks: Sequence[Module], linears: Sequence[ExpertLinear], forward_loop: Callable[[Any], object]
) -> list[Tensor]:
    """Run a loop in evaluation mode, and return the amax of the inputs of each linear, [1] fp32.

    The loop gets the chunk, or the list of several. Every rank must call it. All raise
    NonFiniteError for NaN or Inf, LayoutError for a linear without input on any rank.
    """
    amaxes = [
        torch.full((1,), _NONE, dtype=torch.float32, device=linear.weights()[0].device)
        for linear in linears
    ]
    agree(lambda: _run(chunks, linears, amaxes, forward_loop), None)
    agree(lambda: _require_finite_inputs(linears, amaxes), None)
    _reduce(linears, amaxes, "ep", "expt_tp", "expt_dp")
    agree(lambda: _require_inputs(linears, amaxes), None)
    return amaxes


def _run(
    chunks: Sequence[Module],
    linears: Sequence[ExpertLinear],
    amaxes: Sequence[Tensor],
    forward_loop: Callable[[Any], object],
) -> None:
    with ExitStack() as stack:
        for linear, amax in zip(linears, amaxes, strict=True):
            hook = linear.module.register_forward_pre_hook(partial(_observe, amax))
            stack.callback(hook.remove)
        for module in (one for chunk in chunks for one in chunk.modules() if one.training):
            stack.callback(setattr, module, "training", True)
        for chunk in chunks:
            chunk.eval()
        forward_loop(chunks[0] if len(chunks) == 1 else list(chunks))


def _observe(amax: Tensor, _: Module, args: tuple[Any, ...]) -> None:
    if args and args[0].numel():  # compiled graphs call hooks without arguments
        least, largest = torch.aminmax(args[0].detach())
        amax.copy_(torch.maximum(amax, torch.maximum(-least, largest).float()))


def _find(linear: ExpertLinear) -> Tensor:
    amaxes = []
    for values in linear.values():
        amax = torch.zeros(1, dtype=torch.float32, device=values.device)
        expert_amax_into(amax, values, 0, values.numel())
        amaxes.append(torch.where(values.isnan().all(), _NONE, amax))
    return torch.cat(amaxes)


def _reduce(linears: Sequence[ExpertLinear], amaxes: Sequence[Tensor], *names: str) -> None:
    by_groups: dict[Any, list[Tensor]] = {}
    for linear, amax in zip(linears, amaxes, strict=True):
        groups = tuple(getattr(linear.groups, name) for name in names)
        by_groups.setdefault(groups, []).append(amax)
    for groups, members in by_groups.items():
        together = torch.cat(members)
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(members, together.split([len(amax) for amax in members]))


def _require_numbers(linears: Sequence[ExpertLinear], amaxes: Sequence[Tensor]) -> None:
    faults = []
    for linear, of_experts in zip(linears, amaxes, strict=True):
        first = linear.groups.ep.rank() * linear.num_experts
        for index, amax in enumerate(of_experts.tolist()):
            if not 0 <= amax < torch.inf:
                what = "no number" if amax < 0 else "Inf"
                faults.append(f"{linear.name}: expert {first + index}: {what}")
    if faults:
        raise NonFiniteError(
            f"calibrate: expected finite weights, got {len(faults)} expert(s) without:\n  "
            + "\n  ".join(faults)
            + "\nNothing was stored. Load an earlier checkpoint, or find what wrote them."
        )


def _require_finite_inputs(linears: Sequence[ExpertLinear], amaxes: Sequence[Tensor]) -> None:
    both = zip(linears, amaxes, strict=True)
    faults = [linear.name for linear, amax in both if not amax.isfinite().all()]
    if faults:
        raise NonFiniteError(
            "calibrate: forward_loop: expected finite inputs, got NaN or Inf in those of "
            f"{', '.join(faults)}. Nothing was stored. Look at the first of these layers, and at "
            "the data."
        )


def _require_inputs(linears: Sequence[ExpertLinear], amaxes: Sequence[Tensor]) -> None:
    both = zip(linears, amaxes, strict=True)
    unseen = [linear.name for linear, amax in both if amax.item() == _NONE]
    if unseen:
        raise LayoutError(
            "calibrate: forward_loop: expected inputs of every selected linear, got none on any "
            f"rank for {', '.join(unseen)}. Run the whole model on some tokens, without "
            "torch.compile, CUDA graphs and Transformer Engine's op fuser, which call no hooks."
        )
