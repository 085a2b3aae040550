"""Fake quantization of experts and its gradient, one launch each, with tables cached by address."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.formats import BlockScaledFormat
from moe_optim.kernels import tuning
from moe_optim.kernels.exchange import AMAX_SLOTS
from moe_optim.kernels.plan import ALIGNMENT, BoundKernel, current_device, is_capturing
from moe_optim.kernels.tuning import FlatTile

_KEPT = 4096  # tables of a few KiB: more than the launches that can be queued before one is evicted
_CAPTURED: "set[SpanTable]" = set()
"""Tables that CUDA graphs read at every replay."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpanTable:
    """Experts that one launch reads, one span of elements per expert. See :func:`find_table`."""

    spans: Tensor
    """Spans, [num_experts, SPAN_FIELDS] int64, see ``fields``; the result concatenates them."""
    longest: int
    """Elements of the longest span."""
    aligned: bool
    """Whether every span and its result begin and end at multiples of 16 bytes."""

    def launch_values(
        self, amax: Tensor, result: Tensor, codes: tuple[float, float], *, e4m3: bool
    ) -> None:
        """Write the fake-quantized values of all experts to contiguous ``result``.

        ``amax`` is [num_experts] or [1]; ``codes`` are the smallest and the largest code of the
        grid, which is E4M3 if ``e4m3``, else integers.
        """
        from moe_optim.kernels.fake_kernel import fake_quantize_kernel

        constants = (("E4M3", e4m3),)
        self._launch(
            fake_quantize_kernel, tuning.FAKE_FORWARD, amax, result, *codes, constants=constants
        )

    def launch_gradients(self, amax: Tensor, result: Tensor) -> None:
        """Write the gradients of all experts, zero where a magnitude exceeds its amax."""
        from moe_optim.kernels.fake_kernel import clip_gradient_kernel

        self._launch(clip_gradient_kernel, tuning.FAKE_BACKWARD, amax, result)

    def launch_zeros(self, amax: Tensor, like: Tensor) -> None:
        """Zero the gradients of bf16 experts in place where a magnitude exceeds its amax.

        ``like`` is any of the gradients, which are fp32 or bf16.
        """
        from moe_optim.kernels.fake_kernel import zero_clipped_kernel

        self._launch(zero_clipped_kernel, tuning.FAKE_BACKWARD, amax, like)

    def launch_blocks(self, format: BlockScaledFormat, dtype: torch.dtype, result: Tensor) -> None:
        """Write the values of all experts in row-only ``format`` to contiguous bf16 ``result``.

        ``dtype`` is that of the experts, fp32 or bf16; rows are whole blocks. Formats with a global
        amax take one more launch.
        """
        from moe_optim.kernels.fake_blocks_kernel import fake_blocks_kernel, span_amax_kernel

        read = (("FROM_FP32", dtype == torch.float32), ("ALIGNED", self.aligned))
        experts, device, amaxes = len(self.spans), result.device, None
        with current_device(device):
            if format.has_global_amax:
                amaxes = torch.empty((experts, AMAX_SLOTS), dtype=torch.float32, device=device)
                grid = AMAX_SLOTS, experts
                _bind(span_amax_kernel, tuning.FAKE_AMAX, grid, read, (device,))(self.spans, amaxes)
            tile = tuning.FAKE_BLOCKS
            constants = (
                ("ELEMENT", format.element),
                ("SCALE", format.scale_encoding),
                ("DATA_MAX", format.data_max),
                ("BLOCK", format.block_length),
            )
            grid = -(-self.longest // tile.numel), experts
            bound = _bind(fake_blocks_kernel, tile, grid, (*constants, *read), (device,))
            bound(self.spans, amaxes, result)

    def _launch(
        self,
        kernel: Any,
        tile: FlatTile,
        amax: Tensor,
        result: Tensor,
        *given: float,
        constants: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        with current_device(result.device):
            bound = _bind(
                kernel,
                tile,
                (-(-self.longest // tile.numel), len(self.spans)),
                (("ALIGNED", self.aligned), *constants),
                (amax.dtype, result.dtype, result.device),
            )
            bound(self.spans, amax, int(amax.numel() > 1), result, *given)


@cache
def _bind(
    kernel: Any,
    tile: FlatTile,
    grid: tuple[int, int],
    constants: tuple[tuple[str, Any], ...],
    _compiled_for: tuple[torch.dtype | torch.device, ...],
) -> BoundKernel:
    """Return a kernel for all tables of one size; addresses are arguments of each launch."""
    return BoundKernel(kernel, grid, **dict(constants), TILE=tile.numel, num_warps=tile.num_warps)


def find_table(values: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> SpanTable:
    """Return the table of some experts, from the cache if possible.

    ``values`` are contiguous, of one dtype and device: [R, C] of one expert each, or [E, R, C].
    ``gradients`` match them, or are empty; those of experts apart may have another dtype.
    """
    device = values[0].device
    table = _build(
        tuple(one.data_ptr() for one in values),
        tuple(one.data_ptr() for one in gradients),
        tuple((one.shape[0] if one.dim() == 3 else 1, one.numel()) for one in values),
        values[0].element_size(),
        device,
    )
    if is_capturing(device):
        _CAPTURED.add(table)
    return table


@lru_cache(maxsize=_KEPT)
def _build(
    values: tuple[int, ...],
    gradients: tuple[int, ...],
    sizes: tuple[tuple[int, int], ...],
    itemsize: int,
    device: torch.device,
) -> SpanTable:
    if is_capturing(device):
        raise StateError(
            "fake_quantize: expected experts and gradients where an earlier call found them while "
            "a CUDA graph is captured, got others. Keep them in static memory, and call once "
            "before the capture."
        )
    numels = [total // max(experts, 1) for experts, total in sizes for _ in range(experts)]
    firsts = [0, *accumulate(numels)][:-1]
    rows = zip(
        _addresses(values, sizes, itemsize),
        _addresses(gradients, sizes, itemsize) if gradients else [0] * len(numels),
        numels,
        firsts,
        strict=True,
    )
    spans = torch.tensor([*rows], dtype=torch.int64, device="cpu")
    whole = all(numel % ALIGNMENT == 0 for numel in numels)
    return SpanTable(
        spans=_carry_over(spans, device),
        longest=max(numels),
        aligned=whole and not any(address % ALIGNMENT for address in (*values, *gradients)),
    )


def _addresses(
    bases: tuple[int, ...], sizes: tuple[tuple[int, int], ...], itemsize: int
) -> list[int]:
    return [
        base + expert * (total // experts) * itemsize
        for base, (experts, total) in zip(bases, sizes, strict=True)
        for expert in range(experts)
    ]


def _carry_over(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to its device on a separate stream, without waiting for queued work."""
    if device.type != "cuda":
        return table.to(device)
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        carried = table.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return carried


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
