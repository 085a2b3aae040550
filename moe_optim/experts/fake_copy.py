"""bf16 weights on a grid with one amax an expert, for products as a narrow type would give them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optim.fake_quantization import PerExpertGrid, clipped_gradient, fake_quantized
from moe_optim.formats import Direction
from moe_optim.kernels.member_table import Backend


class FakeQuantizedCopy:
    """What products read in place of bf16 weights: the nearest values of their grids.

    Made at every forward product by one launch over the weights where they lie, and again for its
    dgrad, by the same amaxes: kept are these alone. The amaxes are those of a calibration, and the
    gradient of what these clip is zero; without one they are those of the weights as they are, and
    nothing is clipped.

    Args:
        format: the grid.
        shape: [E, R, C] of all weights.
        name: for errors.
        backend: who quantizes.
    """

    def __init__(
        self,
        format: PerExpertGrid,
        shape: tuple[int, int, int],
        name: str,
        backend: Backend,
    ) -> None:
        self.format = format
        self.shape = shape
        self.name = name
        self.backend = backend
        self._kept: Tensor | None = None  # the amaxes of the last forward product in training

    def __reduce__(self) -> Any:
        """Copy and pickle what it is, without the amaxes of a product."""
        return FakeQuantizedCopy, (self.format, self.shape, self.name, self.backend)

    @torch.no_grad()
    def dequantize(
        self, weights: Sequence[Tensor], direction: Direction, *, keep: bool, amax: Tensor | None
    ) -> Tensor:
        """Return the values of all experts; those of both directions are the same.

        Args:
            weights: one bf16 tensor [E, R, C], or E of [R, C]; contiguous, anywhere in memory.
            direction: rowwise for the forward product, columnwise for dgrad, which takes the
                amaxes of the last forward product that kept them.
            keep: whether a dgrad may take the amaxes of now.
            amax: of a calibration, of E elements or of one; None where there was none.

        Returns:
            [E, R, C] bf16, newly allocated.
        """
        if direction == "rowwise" or self._kept is None:
            found = live_amax(weights) if amax is None else amax.flatten()
            if keep:
                self._kept = found
        else:
            found = self._kept
        plain = [weight.detach() for weight in weights]
        values = fake_quantized(plain, found, self.format.bits, False, self.backend)
        return values.view(self.shape)

    @torch.no_grad()
    def clip_wgrad(self, weights: Sequence[Tensor], wgrad: Tensor, amax: Tensor | None) -> Tensor:
        """Return the weight gradient [E, R, C], zero where a calibrated amax clips the weight."""
        if amax is None:
            return wgrad
        plain = [weight.detach() for weight in weights]
        parts = [wgrad] if weights[0].dim() == 3 else list(wgrad.unbind(0))
        return clipped_gradient(plain, amax.flatten(), parts, self.backend).view(self.shape)


def live_amax(weights: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of every expert as it is, [E] in the dtype of the weights.

    Args:
        weights: one tensor [E, R, C], or E of [R, C]. An expert with NaN has NaN for an amax.
    """
    if weights[0].dim() == 3:
        return torch.linalg.vector_norm(weights[0], math.inf, dim=(1, 2))
    return torch.stack(torch._foreach_norm(list(weights), math.inf))
