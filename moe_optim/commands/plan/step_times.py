"""Estimated time of ``optimizer.step()``, without the all-gather of weights.

Fitted to measurements on H100 and H200 in blockwise FP8, ``recipes/results/step-*.json``; other
formats and GPUs are extrapolated.
"""

from typing import NamedTuple

_FUSED_EFFICIENCY = 0.72
"""Part of a data sheet's memory bandwidth that fused steps reach."""
_FUSED_HOST_MS = 1.5
"""Time of a fused step beside its kernels: gradient norm of all ranks, launches, derived copies."""
_STOCK_US_PER_WEIGHT = 115.0, 250.0
"""Least and most microseconds of stock's step per quantized expert weight, limited by the host."""
_STOCK_BYTES = 48
"""Bytes that stock's passes read and write per parameter: copy, norm, clipping, Adam and cast."""

FUSED_ERROR = 0.16
"""Largest relative error of a fused step's estimate among the measurements."""


UTILIZATION = 0.03
"""Largest part of the bf16 peak that forward and backward reached among them: these models are too
small to fill a GPU, so that they say nothing of the time of an iteration of others.
"""


class StepTime(NamedTuple):
    """Range of a time in ms."""

    least: float
    most: float


def fused_step(nbytes: int, tb_per_s: float) -> StepTime:
    """Return the time of a fused step that reads and writes ``nbytes`` on one rank."""
    ms = nbytes / (_FUSED_EFFICIENCY * tb_per_s * 1e9) + _FUSED_HOST_MS
    return StepTime(ms * (1 - FUSED_ERROR), ms * (1 + FUSED_ERROR))


def stock_step(owned: int, weights: int, tb_per_s: float) -> StepTime:
    """Return the time of Megatron's step of ``owned`` masters and ``weights`` quantized experts."""
    device = _STOCK_BYTES * owned / (_FUSED_EFFICIENCY * tb_per_s * 1e9)
    least, most = (max(device, weights * us / 1e3) for us in _STOCK_US_PER_WEIGHT)
    return StepTime(least, most)
