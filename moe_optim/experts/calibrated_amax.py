"""The amaxes that calibration has found for the experts of a linear: held until the next one.

They are a buffer of the module that holds the weights, so that they move, copy and save with it.
What a requantization records is another thing: see :mod:`moe_optim.weights.recorded_amax`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from moe_optim.errors import LayoutError
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX
from moe_optim.weights.names import base_of


def calibrated_amax(linear: Module) -> Tensor | None:
    """Return what calibration has found for the experts of a linear.

    No rank communicates.

    Args:
        linear: linear of portable experts or of Transformer Engine's, or an adapter around
            one.

    Returns:
        fp32, the buffer itself: [E, 1, 1], one value for each expert here; or [1, 1, 1], one for
        the experts of all ranks. None where the linear has not been calibrated.
    """
    return dict(base_of(linear).named_buffers(recurse=False)).get(CALIBRATED_AMAX)


@torch.inference_mode(False)  # a calibration may come in an evaluation, and training reads it
def set_calibrated_amax(linear: Module, amax: Tensor | None) -> None:
    """Let a linear have these amaxes from now on. No rank communicates.

    Args:
        linear: see :func:`calibrated_amax`.
        amax: as the buffer holds it, kept by reference; None forgets what there is.
    """
    base_of(linear).register_buffer(CALIBRATED_AMAX, amax)


def take_calibrated_amax(
    linear: Module, state_dict: dict[str, Any], prefix: str, num_experts: int, name: str
) -> None:
    """Let a linear have the amaxes of a state dict that its weights are about to be loaded from.

    Weights that come without amaxes leave none behind: those of before are of other weights. Where
    neither comes, what there is stays.

    Args:
        linear: see :func:`calibrated_amax`.
        state_dict: changed, to what torch then finds in place. An entry has E values in any shape,
            one an expert, or one value for all; None counts as none.
        prefix: of the linear in it.
        num_experts: E.
        name: of the linear, for errors.

    Raises:
        LayoutError: another number of values, or values that are no magnitudes.
    """
    key = f"{prefix}{CALIBRATED_AMAX}"
    found = state_dict.pop(key, None)
    if found is not None:
        device = next(linear.parameters()).device
        state_dict[key] = fitted(found, num_experts, name).to(device)
        set_calibrated_amax(linear, state_dict[key])
    elif calibrated_amax(linear) is not None and any(
        key.startswith(f"{prefix}weight") for key in state_dict
    ):
        set_calibrated_amax(linear, None)


def fitted(amax: Any, num_experts: int, name: str) -> Tensor:
    """Return a copy in the shape and dtype of the buffer, on the device of the values.

    Args:
        amax: one value for each expert in any shape, or one for all.
        num_experts: E.
        name: of the linear, for errors.

    Raises:
        LayoutError: another number of values, or values that are no magnitudes.
    """
    where = f"{name}.{CALIBRATED_AMAX}"
    if not isinstance(amax, Tensor) or amax.numel() not in (1, num_experts):
        got = list(amax.shape) if isinstance(amax, Tensor) else type(amax).__name__
        raise LayoutError(
            f"{where}: expected one value for each of {num_experts} experts, or one for all, got "
            f"{got}. Load amaxes of as many experts."
        )
    fitted = amax.detach().to(torch.float32, copy=True).reshape(-1, 1, 1)
    if not (fitted.isfinite() & (fitted >= 0)).all():
        raise LayoutError(
            f"{where}: expected finite magnitudes, got {fitted.flatten().tolist()}. Calibrate the "
            "weights anew, or load without this entry."
        )
    return fitted
