"""Calibration: amaxes of the experts of a model, computed once and kept until the next one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_optim.buckets.bucket_group import gather_weights
from moe_optim.calibration.calibrated_amax import fitted, hold_calibrated_amax
from moe_optim.calibration.fake_quantization import Axis, expert_axis
from moe_optim.calibration.finding import find_input_amaxes, find_weight_amaxes
from moe_optim.calibration.linears import (
    ExpertLinear,
    expert_linears,
    grouped_linears,
    is_portable,
    recorder_of,
    require_chunks,
)
from moe_optim.calibration.selection import INPUT, WEIGHT, QuantCfg, Selection
from moe_optim.calibration.state_entries import listen
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX, CALIBRATED_INPUT_AMAX
from moe_optim.integration.agreement import agree, gather_objects
from moe_optim.weights.names import base_of, modules_by_name, with_global_layers
from moe_optim.weights.te.fields import require_memory

METHODS = ("max",)


@torch.inference_mode(False)
@torch.no_grad()
def calibrate(
    model_chunks: Iterable[torch.nn.Module],
    method: Literal["max"] = "max",
    *,
    axis: Axis | Literal["rank"] = 0,
    quant_cfg: QuantCfg | None = None,
    forward_loop: Callable[[Any], object] | None = None,
) -> None:
    """Compute the amaxes of expert linears, and keep them until the next calibration.

    The amax of a weight is the largest magnitude of an expert's weight as GEMMs read it: of bf16
    values, or of quantized ones dequantized rowwise. NaN is ignored. All ranks that hold the expert
    or a shard of it get the same amax, by a MAX over expert-tensor-parallel and
    expert-data-parallel ranks; ``axis=0`` never reduces over experts or expert-parallel ranks.

    The amax of inputs is the largest magnitude of the tokens of all experts of a layer while
    ``forward_loop`` runs, a MAX over all ranks of the pipeline stage. Ranks may get no tokens.

    ``quant_cfg`` selects linears by name, ``decoder.layers.0.mlp.experts.linear_fc1``, where layers
    count over all pipeline stages. Everything that is not selected loses its amax, like a disabled
    quantizer. Without ``forward_loop``, selected inputs keep the amax that they have.

    Every rank must call it with all of its chunks, including ranks without MoE layers. If one rank
    raises, all do, and nothing is stored. Stale weights of DDP-wrapped chunks are gathered first.

    Modules store the results as fp32 buffers, see :func:`moe_optim.calibrated_amax` and
    :func:`moe_optim.calibrated_input_amax`. They are saved and loaded with the weights, under
    global expert ids, and training does not change them.

    Args:
        model_chunks: chunks of this rank's pipeline stage, wrapped or not.
        method: ``max``, the largest magnitude.
        axis: 0 or ``(0,)`` for one amax per expert, [E, 1, 1] for the local ones; None for one per
            linear, [1, 1, 1], over the experts of all expert-parallel ranks; ``rank`` for one over
            the experts of this rank, [E, 1, 1] of equal values.
        quant_cfg: patterns of ``fnmatch`` over names of linears, or rules over names of quantizers
            as the entry ``quant_cfg`` of a configuration of NVIDIA ModelOpt 0.47, in its order: a
            list, or its older dict. None selects all weights and inputs.
        forward_loop: function that runs the model, called once on each rank without gradients and
            in evaluation mode, with the chunk, or the list of several. None calibrates weights
            only.

    Raises:
        ConfigError: an unsupported method, axis or ``quant_cfg``, or one that differs between
            ranks; a pattern that matches no linear on any rank; no list of chunks; or a
            ``forward_loop`` that is no function.
        LayoutError: no rank has grouped experts, a linear has no experts, weights are on the
            ``meta`` device, or a selected linear got no input on any rank.
        StateError: stale weights without a DDP module that gathers them, or offloaded weights.
        NonFiniteError: an expert contains Inf, or only NaN; or inputs contain either.
    """
    chunks, linears, call = agree(
        lambda: _check_call(model_chunks, method, axis, quant_cfg, forward_loop), None
    )
    chosen = call["quant_cfg"].choose(_require_one_call([one.name for one in linears], call))
    of_weights, of_inputs = (
        [linear for linear in linears if kind in chosen[linear.name]] for kind in (WEIGHT, INPUT)
    )
    agree(lambda: _require_readable(linears, of_weights), None)
    for chunk in chunks:
        gather_weights(chunk)
    weights = find_weight_amaxes(of_weights, call["axis"])
    inputs = None
    if forward_loop is not None:
        inputs = find_input_amaxes(chunks, of_inputs, forward_loop)
    for chunk in chunks:
        listen(chunk)
    for linear in linears:
        if WEIGHT not in chosen[linear.name]:
            hold_calibrated_amax(linear.module, None)
        if INPUT not in chosen[linear.name]:
            hold_calibrated_amax(linear.module, None, CALIBRATED_INPUT_AMAX)
    for linear, amax in zip(of_weights, weights, strict=True):
        hold_calibrated_amax(linear.module, amax.view(-1, 1, 1))
    if inputs is not None:
        for linear, amax in zip(of_inputs, inputs, strict=True):
            hold_calibrated_amax(linear.module, amax.view(-1, 1, 1), CALIBRATED_INPUT_AMAX)


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
    _set(linear, CALIBRATED_AMAX, amax)


def set_calibrated_input_amax(linear: torch.nn.Module, amax: Tensor | None) -> None:
    """Set the calibrated amax of the inputs of a linear, until the next calibration of inputs.

    It is saved and loaded like that of :func:`calibrate`. No rank communicates: pass the same value
    on every rank that holds experts of the layer.

    Args:
        linear: linear of portable experts or of Transformer Engine, or an adapter around one.
        amax: one value in any shape; any floating-point dtype and device; copied. None removes the
            amax.

    Raises:
        LayoutError: an unsupported module, several values, or a negative or non-finite value.
    """
    _set(linear, CALIBRATED_INPUT_AMAX, amax)


def _set(linear: torch.nn.Module, buffer: str, amax: Tensor | None) -> None:
    base: Any = base_of(linear)
    if is_portable(base):
        count = base.shape[0]
    elif any(one is base for _, one in grouped_linears(base)):
        count = base.num_gemms
    else:
        raise LayoutError(
            f"set_{buffer}: linear: expected one of portable experts or a grouped linear of "
            f"Transformer Engine, got {type(linear).__name__}. Give experts.linear_fc1 or "
            "experts.linear_fc2."
        )
    values = None
    if amax is not None:
        count = count if buffer == CALIBRATED_AMAX else 1
        device = next(base.parameters()).device
        values = fitted(amax, count, f"{recorder_of(base).name}.{buffer}").to(device)
    listen(linear)
    hold_calibrated_amax(base, values, buffer)


def _check_call(
    model_chunks: Any, method: str, axis: Any, quant_cfg: QuantCfg | None, forward_loop: Any
) -> tuple[list[torch.nn.Module], list[ExpertLinear], dict[str, Any]]:
    """Return chunks, their linears, and the arguments that must be the same on every rank."""
    if axis != "rank":
        axis = expert_axis(axis, "calibrate", ", or 'rank' for one per rank")
    selection = Selection.of(quant_cfg)
    if method not in METHODS:
        raise ConfigError(
            f"calibrate: method: expected one of {', '.join(METHODS)}, got {method!r}. Give one of "
            "them."
        )
    chunks = require_chunks(model_chunks, "calibrate")
    if forward_loop is not None and not callable(forward_loop):
        raise ConfigError(
            "calibrate: forward_loop: expected a function of the model, or None, got "
            f"{type(forward_loop).__name__}. Give one that calls the model on some batches."
        )
    linears = []
    for chunk in chunks:
        modules = modules_by_name(chunk)
        for linear in expert_linears(chunk):
            linears.append(replace(linear, name=with_global_layers(linear.name, modules)))
    call = {"axis": axis, "quant_cfg": selection, "forward_loop": forward_loop is not None}
    return chunks, linears, call


def _require_one_call(names: list[str], call: dict[str, Any]) -> set[str]:
    """Return the names of all ranks' linears; raise unless all ranks make the same call."""
    ranks = gather_objects((names, call), None)
    every = {name for names, _ in ranks for name in names}
    if not every:
        raise LayoutError(
            "calibrate: expected MoE layers with grouped experts, got none on any rank. Build the "
            "model with --num-experts and --moe-grouped-gemm: sequential experts have no grouped "
            "weights."
        )
    first = ranks[0][1]
    for rank, (_, other) in enumerate(ranks):
        for key, value in first.items():
            if other[key] != value:
                raise ConfigError(
                    f"calibrate: {key}: expected the same on every rank, got {value!r} on rank 0 "
                    f"and {other[key]!r} on rank {rank}. Give one of them."
                )
    return every


def _require_readable(linears: Sequence[ExpertLinear], of_weights: Sequence[ExpertLinear]) -> None:
    for linear in linears:
        if not linear.num_experts or not linear.weights():
            raise LayoutError(
                f"calibrate: {linear.name}: expected experts, got none. Build the layer with some."
            )
    for linear in of_weights:
        where = f"calibrate: {linear.name}"
        if any(weight.device.type == "meta" for weight in linear.weights()):
            raise LayoutError(
                f"{where}: expected weights with values, got meta tensors. Build the model on a "
                "device and load its weights first."
            )
        for weight in linear.weights():
            require_memory(where, weight)
