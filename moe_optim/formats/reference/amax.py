"""Amax per expert, computed from any range of a weight."""

import torch
from torch import Tensor

from moe_optim.formats.reference.blocks import as_magnitude, magnitude_bits


@torch.no_grad()
def expert_amax_into(out: Tensor, source: Tensor, start: int, numel: int) -> None:
    """Raise the amax of every expert that a range of a weight touches, in place.

    Values are rounded to bf16 first and NaN counts as zero. The maximum over any ranges that cover
    a weight is the amax of whole experts.

    Args:
        out: [E] fp32, replaced by the maximum of its value and the computed amax.
        source: fp32 or bf16, the elements of the weight from ``start`` on in row-major order.
        start: first element of the source, counted in the weight.
        numel: elements of one expert.
    """
    flat = source.reshape(-1)
    end = start + flat.numel()
    if start == end:
        return
    for expert in range(start // numel, -(-end // numel)):
        low, high = max(start, expert * numel), min(end, (expert + 1) * numel)
        bits = magnitude_bits(flat[low - start : high - start].bfloat16())
        out[expert] = torch.maximum(out[expert], as_magnitude(bits.amax()))
