"""Calibrated amaxes of a linear's experts, kept until the next calibration.

They are a buffer of the module that holds the weights, so they move, copy and save with it.
Recorded amaxes of requantizations are separate: see :mod:`moe_optim.weights.recorded_amax`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from moe_optim.errors import LayoutError
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX
from moe_optim.weights.names import base_of


def calibrated_amax(linear: Module) -> Tensor | None:
    """Return the calibrated amaxes of the experts of a linear. No rank communicates.

    Args:
        linear: linear of portable experts or of Transformer Engine, or an adapter around one.

    Returns:
        The fp32 buffer itself: [E, 1, 1], one value per local expert; or [1, 1, 1], one for the
        experts of all ranks. None without calibration.
    """
    return dict(base_of(linear).named_buffers(recurse=False)).get(CALIBRATED_AMAX)


@torch.inference_mode(False)  # calibrated in an evaluation, read in training
def hold_calibrated_amax(linear: Module, amax: Tensor | None) -> None:
    """Set the calibrated amaxes of a linear, kept by reference; None removes them."""
    base_of(linear).register_buffer(CALIBRATED_AMAX, amax)


def take_calibrated_amax(
    linear: Module, state_dict: dict[str, Any], prefix: str, num_experts: int, name: str
) -> None:
    """Set the amaxes from a state dict whose weights are about to be loaded into a linear.

    The dict is modified so that torch finds the amaxes in place. An entry has one value per expert
    in any shape, or one for all; None counts as missing. Weights without amaxes remove the previous
    amaxes; a state dict with neither changes nothing.

    Raises:
        LayoutError: a wrong number of values, or negative or non-finite values.
    """
    key = f"{prefix}{CALIBRATED_AMAX}"
    found = state_dict.pop(key, None)
    if found is not None:
        device = next(linear.parameters()).device
        state_dict[key] = fitted(found, num_experts, name).to(device)
        hold_calibrated_amax(linear, state_dict[key])
    elif calibrated_amax(linear) is not None and any(
        key.startswith(f"{prefix}weight") for key in state_dict
    ):
        hold_calibrated_amax(linear, None)


def fitted(amax: Any, num_experts: int, name: str) -> Tensor:
    """Return an fp32 copy of amaxes in the shape of the buffer, [E, 1, 1] or [1, 1, 1].

    Raises:
        LayoutError: a wrong number of values, or negative or non-finite values.
    """
    where = f"{name}.{CALIBRATED_AMAX}"
    if not isinstance(amax, Tensor) or amax.numel() not in (1, num_experts):
        got = list(amax.shape) if isinstance(amax, Tensor) else type(amax).__name__
        raise LayoutError(
            f"{where}: expected one value for each of {num_experts} experts, or one for all, got "
            f"{got}. Load amaxes of as many experts."
        )
    fitted = as_buffer(amax)
    if not are_magnitudes(fitted):
        raise LayoutError(
            f"{where}: expected finite magnitudes, got {fitted.flatten().tolist()}. Calibrate the "
            "weights anew, or load without this entry."
        )
    return fitted


def as_buffer(amax: Tensor) -> Tensor:
    """Return an fp32 copy, [values, 1, 1]."""
    return amax.detach().to(torch.float32, copy=True).reshape(-1, 1, 1)


def are_magnitudes(amax: Tensor) -> bool:
    """Return whether all values are finite and nonnegative."""
    return bool((amax.isfinite() & (amax >= 0)).all())
