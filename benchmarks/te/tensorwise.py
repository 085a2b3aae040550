"""Transformer Engine's weights with per-tensor scaling: cast of masters, and transposes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.te.cast import require_same
from moe_optim.kernels.tensorwise import ScaledWeight
from moe_optim.weights.te.fields import TENSORWISE

_POISON = 0x5A


class Cast:
    """Weights cast from masters, which own their first elements.

    Args:
        shapes: rows and columns of each weight.
        masters: [n] fp32, first elements of each weight.
        group: ranks that own the rest.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        masters: Sequence[Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        from transformer_engine.pytorch.tensor import utils

        self._cast = utils.quantize_master_weights
        self._masters, self._group = list(masters), group
        self._weights = _make_weights(shapes, masters[0].device)

    def quantize(self) -> None:
        """Write data and scales, as Megatron does after a step."""
        self._cast(
            self._weights,
            self._masters,
            [0] * len(self._masters),
            self._group,
            manual_post_all_gather_processing=True,  # as Megatron 0.19 does
        )

    def check(self, ours: Sequence[ScaledWeight]) -> None:
        """Compare data and scales with our weights, in order; PatchError if they differ."""
        require_same(self._pairs(ours), TENSORWISE)

    def _pairs(self, ours: Sequence[ScaledWeight]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for one, weight in zip(ours, self._weights, strict=True):
            yield "codes", one.data, weight._data.view(-1)[: one.data.numel()]
            yield "scales", one.scale_inv, weight._scale_inv.view(1)


class Transposes:
    """Gathered weights and their transposes.

    Args:
        codes: [R, C] uint8 data of each weight; copied.
    """

    def __init__(self, codes: Sequence[Tensor]) -> None:
        from transformer_engine.pytorch.tensor import utils

        self._finish = utils.post_all_gather_processing
        self._weights = _make_weights([tuple(one.shape) for one in codes], codes[0].device)
        for weight, one in zip(self._weights, codes, strict=True):
            weight._data.copy_(one)

    def write(self) -> None:
        """Write all transposes, as Megatron does after a gather."""
        self._finish(self._weights)

    def check(self, ours: Sequence[Tensor]) -> None:
        """Compare with our transposes, in order; PatchError if they differ."""
        theirs = [weight._transpose for weight in self._weights]
        pairs = zip(ours, theirs, strict=True)
        require_same((("transposes", *pair) for pair in pairs), TENSORWISE)


def _make_weights(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Any]:
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=device)
    weights = [quantizer.make_empty(s, dtype=torch.bfloat16, device=device) for s in shapes]
    for weight in weights:
        weight._data.fill_(_POISON)
        weight._scale_inv.fill_(torch.nan)
    return weights
