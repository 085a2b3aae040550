"""Calibration: the amax of every expert of a model, computed once and kept until the next one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.buckets.bucket_group import gather_weights
from moe_optim.calibration.calibrated_amax import fitted, hold_calibrated_amax
from moe_optim.calibration.fake_quantization import Axis, expert_axis
from moe_optim.calibration.linears import (
    ExpertLinear,
    expert_linears,
    grouped_linears,
    is_portable,
    recorder_of,
)
from moe_optim.calibration.state_entries import listen
from moe_optim.errors import ConfigError, LayoutError, NonFiniteError
from moe_optim.formats.reference.amax import expert_amax_into
from moe_optim.integration.agreement import agree
from moe_optim.weights.names import base_of
from moe_optim.weights.te.fields import require_memory

METHODS = ("max",)
_NO_NUMBER = -1.0
"""Amax of an expert without numbers on this rank; less than any other."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    linear: ExpertLinear
    amax: Tensor
    """Amaxes, fp32: [E] for local experts, or [1] for all experts."""


@torch.inference_mode(False)
@torch.no_grad()
def calibrate(
    model_chunks: Iterable[torch.nn.Module],
    method: Literal["max"] = "max",
    *,
    axis: Axis = 0,
) -> None:
    """Compute the amax of the experts of every MoE layer, and keep it until the next calibration.

    An amax is the largest magnitude of an expert's weight as GEMMs read it: of bf16 values, or of
    quantized ones dequantized rowwise. NaN is ignored. All ranks that hold the expert or a shard of
    it get the same amax, by a MAX over expert-tensor-parallel and expert-data-parallel ranks;
    ``axis=0`` never reduces over experts or expert-parallel ranks.

    Every rank must call it with all of its chunks, including ranks without MoE layers. If one rank
    raises, all do, and nothing is stored. Stale weights of DDP-wrapped chunks are gathered first.

    Modules store the result as an fp32 buffer, see :func:`moe_optim.calibrated_amax`. It is saved
    and loaded with the weights, under global expert ids, and training does not change it.

    Args:
        model_chunks: chunks of this rank's pipeline stage, wrapped or not.
        method: ``max``, the largest magnitude.
        axis: 0 or ``(0,)`` for one amax per expert, [E, 1, 1] for the local ones; None for one per
            linear, [1, 1, 1], over the experts of all expert-parallel ranks.

    Raises:
        ConfigError: an unsupported method or axis, or one that differs between ranks; or no list of
            chunks.
        LayoutError: no rank has grouped experts, a linear has no experts, or weights are on the
            ``meta`` device.
        StateError: stale weights without a DDP module that gathers them, or offloaded weights.
        NonFiniteError: an expert contains Inf, or only NaN.
    """
    one_axis: int | None = agree(lambda: expert_axis(axis, "calibrate"), None)
    chunks = agree(lambda: _chunks_of(model_chunks, method), None)
    linears: list[ExpertLinear] = agree(lambda: _readable_linears(chunks), None)
    _require_one_call(len(linears), one_axis)
    for chunk in chunks:
        gather_weights(chunk)
    found: list[_Found] = agree(lambda: [_find(linear) for linear in linears], None)
    _reduce(found, "expt_tp", "expt_dp")
    agree(lambda: _require_numbers(found), None)
    if one_axis is None:
        found = [replace(one, amax=one.amax.amax().view(1)) for one in found]
        _reduce(found, "ep")
    for chunk in chunks:
        listen(chunk)
    for one in found:
        hold_calibrated_amax(one.linear.module, one.amax.view(-1, 1, 1))


def set_calibrated_amax(linear: torch.nn.Module, amax: Tensor | None) -> None:
    """Set the calibrated amaxes of a linear, until the next calibration.

    They are saved and loaded like those of :func:`calibrate`. No rank communicates: pass the same
    value on every rank that holds an expert or a shard of it.

    Args:
        linear: linear of portable experts or of Transformer Engine, or an adapter around one.
        amax: one value per local expert in any shape, or one for the experts of all ranks; any
            floating-point dtype and device; copied. None removes the amaxes.

    Raises:
        LayoutError: an unsupported module, a wrong number of values, or negative or non-finite
            values.
    """
    base: Any = base_of(linear)
    if is_portable(base):
        count = base.shape[0]
    elif any(one is base for _, one in grouped_linears(base)):
        count = base.num_gemms
    else:
        raise LayoutError(
            "set_calibrated_amax: linear: expected one of portable experts or a grouped linear of "
            f"Transformer Engine, got {type(linear).__name__}. Give experts.linear_fc1 or "
            "experts.linear_fc2."
        )
    values = None if amax is None else fitted(amax, count, recorder_of(base).name)
    listen(linear)
    device = next(base.parameters()).device
    hold_calibrated_amax(base, None if values is None else values.to(device))


def _chunks_of(model_chunks: Iterable[torch.nn.Module], method: str) -> list[torch.nn.Module]:
    if method not in METHODS:
        raise ConfigError(
            f"calibrate: method: expected one of {', '.join(METHODS)}, got {method!r}. Give one of "
            "them."
        )
    chunks = [] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        got = [type(chunk).__name__ for chunk in chunks] or type(model_chunks).__name__
        raise ConfigError(
            f"calibrate: model_chunks: expected a list of this rank's model chunks, got "
            f"{got if chunks else f'no chunk ({got})'}. Give what get_model() returned, or [model]."
        )
    return chunks


def _readable_linears(chunks: Sequence[torch.nn.Module]) -> list[ExpertLinear]:
    linears = [linear for chunk in chunks for linear in expert_linears(chunk)]
    for linear in linears:
        where, weights = f"calibrate: {linear.name}", linear.weights()
        if not linear.num_experts or not weights:
            raise LayoutError(f"{where}: expected experts, got none. Build the layer with some.")
        if any(weight.device.type == "meta" for weight in weights):
            raise LayoutError(
                f"{where}: expected weights with values, got meta tensors. Build the model on a "
                "device and load its weights first."
            )
        for weight in weights:
            require_memory(where, weight)
    return linears


def _find(linear: ExpertLinear) -> _Found:
    amaxes = []
    for values in linear.values():
        amax = torch.zeros(1, dtype=torch.float32, device=values.device)
        expert_amax_into(amax, values, 0, values.numel())
        amaxes.append(torch.where(values.isnan().all(), _NO_NUMBER, amax))
    return _Found(linear=linear, amax=torch.cat(amaxes))


def _require_one_call(count: int, axis: int | None) -> None:
    """Check that some rank has experts, and that all ranks reduce the same way."""
    calls: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(calls, (count, axis))
    if not any(count for count, _ in calls):
        raise LayoutError(
            "calibrate: expected MoE layers with grouped experts, got none on any rank. Build the "
            "model with --num-experts and --moe-grouped-gemm: sequential experts have no grouped "
            "weights."
        )
    axes = [axis for _, axis in calls]
    if len(set(axes)) > 1:
        raise ConfigError(
            f"calibrate: axis: expected the same on every rank, got {axes}. Give one of them."
        )


def _reduce(found: Sequence[_Found], *names: str) -> None:
    by_groups: dict[Any, list[_Found]] = {}
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


def _require_numbers(found: Sequence[_Found]) -> None:
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
