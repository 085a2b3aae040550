"""Calibrated amaxes of a linear's weights and inputs, kept until the next calibration.

They are buffers of the module that holds the weights, so they move, copy and save with it.
Recorded amaxes of requantizations are separate: see :mod:`moe_optim.weights.recorded_amax`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from moe_optim.errors import LayoutError
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX, CALIBRATED_INPUT_AMAX
from moe_optim.weights.names import base_of

BUFFERS = (CALIBRATED_AMAX, CALIBRATED_INPUT_AMAX)
"""Names of the buffers."""


def calibrated_amax(linear: Module) -> Tensor | None:
    """Return the calibrated amaxes of the experts of a linear. No rank communicates.

    Args:
        linear: linear of portable experts or of Transformer Engine, or an adapter around one.

    Returns:
        The fp32 buffer itself: [E, 1, 1], one value per local expert; or [1, 1, 1], one for the
        experts of all ranks. None without calibration.
    """
    return _held(linear, CALIBRATED_AMAX)


def calibrated_input_amax(linear: Module) -> Tensor | None:
    """Return the calibrated amax of the inputs of a linear. No rank communicates.

    Nothing here multiplies with it: it is for engines and for ModelOpt.

    Args:
        linear: linear of portable experts or of Transformer Engine, or an adapter around one.

    Returns:
        The fp32 buffer itself, [1, 1, 1], one value for all experts of the layer. None without a
        calibration of inputs.
    """
    return _held(linear, CALIBRATED_INPUT_AMAX)


def _held(linear: Module, buffer: str) -> Tensor | None:
    return dict(base_of(linear).named_buffers(recurse=False)).get(buffer)


@torch.inference_mode(False)  # calibrated in an evaluation, read in training
def hold_calibrated_amax(
    linear: Module, amax: Tensor | None, buffer: str = CALIBRATED_AMAX
) -> None:
    """Set calibrated amaxes of a linear, kept by reference; None removes them."""
    base = base_of(linear)
    if amax is not None or buffer in base._buffers:
        base.register_buffer(buffer, amax)


def held_amaxes(linear: Module) -> dict[str, Tensor]:
    """Return the calibrated amaxes of a linear by buffer."""
    return {buffer: amax for buffer in BUFFERS if (amax := _held(linear, buffer)) is not None}


def move_amaxes(
    linear: Module, amaxes: Mapping[str, Tensor], fn: Callable[[Tensor], Tensor]
) -> None:
    """Move the amaxes that a linear had before ``_apply(fn)``, without a cast to another dtype."""
    for buffer, amax in amaxes.items():
        hold_calibrated_amax(linear, amax.to(fn(amax).device), buffer)


def take_calibrated_amaxes(
    linear: Module, state_dict: dict[str, Any], prefix: str, num_experts: int, name: str
) -> None:
    """Set the amaxes from a state dict whose weights are about to be loaded into a linear.

    The dict is modified so that torch finds the amaxes in place. None, and NaN everywhere, which
    marks a linear without amaxes in a checkpoint, count as missing. Weights without an amax remove
    the previous one; a state dict with neither changes nothing.
    """
    brings_weights = any(key.startswith(f"{prefix}weight") for key in state_dict)
    for buffer, count in ((CALIBRATED_AMAX, num_experts), (CALIBRATED_INPUT_AMAX, 1)):
        key = f"{prefix}{buffer}"
        found = state_dict.pop(key, None)
        is_marked = isinstance(found, Tensor) and bool(found.numel() and found.isnan().all())
        if found is not None and not is_marked:
            device = next(linear.parameters()).device
            state_dict[key] = fitted(found, count, f"{name}.{buffer}").to(device)
            hold_calibrated_amax(linear, state_dict[key], buffer)
        elif brings_weights:
            hold_calibrated_amax(linear, None, buffer)


def local_amaxes(amax: Tensor, count: int, ep: tuple[int, int]) -> Tensor:
    """Return the amaxes of the ``count`` local experts, given those or all, in any shape.

    Any other number is returned unchanged, for the linear to refuse. ``ep`` is the rank in the
    expert-parallel group, and its size.
    """
    rank, size = ep
    if amax.numel() != count * size:
        return amax
    return amax.reshape(-1)[rank * count :][:count]


def fitted(amax: Any, count: int, where: str) -> Tensor:
    """Return an fp32 copy, [count, 1, 1] or [1, 1, 1]; LayoutError for anything else."""
    if not isinstance(amax, Tensor) or amax.numel() not in (1, count):
        got = list(amax.shape) if isinstance(amax, Tensor) else type(amax).__name__
        expected = f"one value for each of {count} experts, or one for all"
        raise LayoutError(
            f"{where}: expected {expected if count > 1 else 'one value'}, got {got}. Load amaxes "
            "of as many experts."
        )
    fitted = as_buffer(amax)
    if not are_magnitudes(fitted):
        raise LayoutError(
            f"{where}: expected finite magnitudes, got {fitted.flatten().tolist()}. Calibrate the "
            "model anew, or load without this entry."
        )
    return fitted


def as_buffer(amax: Tensor) -> Tensor:
    """Return an fp32 copy, [values, 1, 1]."""
    return amax.detach().to(torch.float32, copy=True).reshape(-1, 1, 1)


def are_magnitudes(amax: Tensor) -> bool:
    """Return whether all values are finite and nonnegative."""
    return bool((amax.isfinite() & (amax >= 0)).all())
