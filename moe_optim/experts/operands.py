"""What GEMMs of bf16 experts read: the weights side by side, or a quantized copy of them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optim.calibration.fake_quantization import (
    PerExpertGrid,
    clipped_gradient,
    fake_quantized,
)
from moe_optim.formats import BlockScaledFormat, Direction
from moe_optim.kernels.member_table import Backend, MemberTable, TableEntry
from moe_optim.weights.storage import PortableStorage

_ALIGNMENT = 16  # bytes: what grouped GEMMs require of every stride, and of where a tensor begins


class _Copy[Format]:
    """A copy of bf16 weights in another format.

    Args:
        format: format of the copy.
        shape: [E, R, C] of all weights.
        name: name of the weight, for errors.
        backend: ``auto`` or ``reference``.
    """

    def __init__(
        self, format: Format, shape: tuple[int, int, int], name: str, backend: Backend
    ) -> None:
        self.format, self.shape, self.name, self.backend = format, shape, name, backend

    def __reduce__(self) -> Any:
        """Copy and pickle without buffers and amaxes, which follow from the weights."""
        return type(self), (self.format, self.shape, self.name, self.backend)


class QuantizedCopy(_Copy[BlockScaledFormat]):
    """Values of a block-scaled format in place of bf16 weights, quantized in one call.

    Every forward GEMM makes the copy anew, since bf16 weights may be written in ways that torch
    does not see: optimizer and gather write through the buffer that weights are views of, and
    others through ``data``. A dgrad reads the copy of the last forward GEMM.

    Raises:
        LayoutError: the shape does not fit the format.
    """

    def __init__(
        self,
        format: BlockScaledFormat,
        shape: tuple[int, int, int],
        name: str,
        backend: Backend,
    ) -> None:
        format.check_shape(shape, name)
        super().__init__(format, shape, name, backend)
        self._storage: PortableStorage | None = None
        self._table: MemberTable | None = None
        self._places: tuple[int, ...] = ()  # where the weights lay when the table was built
        self._made_of: tuple[int, ...] | None = None  # how often each weight had been written

    @torch.no_grad()
    def dequantize(
        self,
        weights: Sequence[Tensor],
        direction: Direction,
        *,
        keep: bool,
        amax: Tensor | None = None,
    ) -> Tensor:
        """Return the values of one direction.

        Args:
            weights: one bf16 tensor [E, R, C], or E of [R, C]; contiguous.
            direction: rowwise for the forward GEMM, columnwise for dgrad.
            keep: whether a dgrad may read the copy that is made now.
            amax: calibrated amax, not read: blocks have their own.

        Returns:
            [E, R, C] bf16, newly allocated.
        """
        places = tuple(weight.data_ptr() for weight in weights)
        if self._storage is None or self._table is None or places != self._places:
            self._storage, self._table = self._lay_out(weights)
            self._places, self._made_of = places, None
        now = tuple(weight._version for weight in weights)
        if direction == "rowwise" or now != self._made_of:
            self._table.launch()
            self._table.finish.launch()
            self._made_of = now if keep else None
        return self._storage.dequantize(direction)

    def clip_wgrad(
        self,
        weights: Sequence[Tensor],
        wgrad: Tensor,
        amax: Tensor | None,
    ) -> Tensor:
        """Return the weight gradient unchanged: the scale of a block clips nothing."""
        return wgrad

    @torch.inference_mode(False)  # an evaluation may come first, and training writes them
    def _lay_out(self, weights: Sequence[Tensor]) -> tuple[PortableStorage, MemberTable]:
        storage = PortableStorage(self.format, self.shape, name=self.name, device=weights[0].device)
        targets = (
            [storage.quantized]
            if weights[0].dim() == 3
            else [storage.expert(index).quantized for index in range(len(weights))]
        )
        entries = [
            TableEntry(
                parameter=self.name, source=weight.detach().view(target.shape), target=target
            )
            for weight, target in zip(weights, targets, strict=True)
        ]
        return storage, MemberTable.build(entries, backend=self.backend)


class FakeQuantizedCopy(_Copy[PerExpertGrid]):
    """Nearest values of a grid with one amax per expert, in place of bf16 weights.

    Each forward GEMM makes them by one launch over the weights where they lie, and its dgrad makes
    them again by the same amaxes, which alone are kept. Amaxes are those of a calibration, and the
    gradient of what they clip is zero; without one they are those of the present weights, and
    nothing is clipped.
    """

    _kept: Tensor | None = None  # the amaxes of the last forward GEMM in training

    @torch.no_grad()
    def dequantize(
        self, weights: Sequence[Tensor], direction: Direction, *, keep: bool, amax: Tensor | None
    ) -> Tensor:
        """Return the values of all experts, the same in both directions.

        Args:
            weights: one bf16 tensor [E, R, C], or E of [R, C]; contiguous, anywhere in memory.
            direction: rowwise for the forward GEMM, columnwise for dgrad, which reads the amaxes
                of the last forward GEMM that kept them.
            keep: whether a dgrad may read the present amaxes.
            amax: calibrated amax, of E elements or of one; None where there is none.

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


def stack_experts(experts: Sequence[Tensor]) -> Tensor:
    """Return experts as one tensor, detached.

    Args:
        experts: E contiguous tensors [R, C] of one dtype on one device.

    Returns:
        [E, R, C]: a view where they lie in one memory at equal distances, in order, else a copy.
    """
    if not lie_together(experts):
        return torch.stack([expert.detach() for expert in experts])
    rows, cols = experts[0].shape
    shape = (len(experts), rows, cols)
    return experts[0].detach().as_strided(shape, (_distance(experts), cols, 1))


def lie_together(experts: Sequence[Tensor]) -> bool:
    """Return whether experts can be viewed as one tensor without a copy."""
    first, step = experts[0], _distance(experts)
    size = first.element_size()
    end = first.storage_offset() + (len(experts) - 1) * step + first.numel()
    return (
        step >= first.numel()
        and step * size % _ALIGNMENT == 0
        and first.data_ptr() % _ALIGNMENT == 0
        and end * size <= first.untyped_storage().nbytes()
        and all(
            expert.data_ptr() == first.data_ptr() + index * step * size and expert.is_contiguous()
            for index, expert in enumerate(experts)
        )
    )


def _distance(experts: Sequence[Tensor]) -> int:
    """Return the elements from the first expert to the second; of one alone, its size."""
    if len(experts) == 1:
        return experts[0].numel()
    return (experts[1].data_ptr() - experts[0].data_ptr()) // experts[0].element_size()
