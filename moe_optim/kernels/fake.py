"""Fake quantization of experts that lie anywhere, and its gradient, in one launch each.

A table is a function of addresses, so that none can be out of date: callers ask for the table of
the present addresses, and mostly find one that was built before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.kernels import tuning
from moe_optim.kernels.plan import ALIGNMENT, BoundKernel, current_device, is_capturing
from moe_optim.kernels.tuning import FlatTile

_KEPT = 4096  # tables of some KiB each: more than launches can be queued before one is let go
_CAPTURED: "set[SpanTable]" = set()
"""Tables that launches of a CUDA graph read at every replay."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpanTable:
    """Experts that one launch reads, each a span of elements. See :func:`find_table`."""

    spans: Tensor
    """[num_experts, SPAN_FIELDS] int64, see ``fields``; the result has one span after the other."""
    longest: int
    """Elements of the longest span."""
    aligned: bool
    """Whether every span begins and ends at multiples of 16 bytes, and so does its result."""

    def launch_values(
        self, amax: Tensor, result: Tensor, codes: tuple[float, float], *, e4m3: bool
    ) -> None:
        """Write the values of all experts on their grids.

        Args:
            amax: [num_experts], or [1] for all of them.
            result: contiguous, with the number of elements and the dtype of all experts.
            codes: smallest and largest code.
            e4m3: whether the grid is E4M3, and not integers.
        """
        from moe_optim.kernels.fake_kernel import fake_quantize_kernel

        constants = (("E4M3", e4m3),)
        self._launch(
            fake_quantize_kernel, tuning.FAKE_FORWARD, amax, result, *codes, constants=constants
        )

    def launch_gradients(self, amax: Tensor, result: Tensor) -> None:
        """Write the gradients of all experts, zero where a value is beyond its amax.

        Args:
            amax: [num_experts], or [1] for all of them.
            result: contiguous, with the number of elements and the dtype of all experts.
        """
        from moe_optim.kernels.fake_kernel import clip_gradient_kernel

        self._launch(clip_gradient_kernel, tuning.FAKE_BACKWARD, amax, result)

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
    _compiled_for: tuple[torch.dtype, torch.dtype, torch.device],
) -> BoundKernel:
    """Return a kernel for any tables of one size: addresses may change with every launch."""
    return BoundKernel(kernel, grid, **dict(constants), TILE=tile.numel, num_warps=tile.num_warps)


def find_table(values: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> SpanTable:
    """Return the table of some experts, built or found.

    Args:
        values: contiguous, of one dtype on one device: [R, C] of one expert each, or [E, R, C].
        gradients: none, or one for each of the values, of the same shape and dtype.

    Raises:
        StateError: a table is missing while a CUDA graph is captured.
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
    """Return the table of some addresses, of tensors with these experts and elements."""
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
    """Return a table on its device, ready for launches on any stream.

    A GPU copies it on a stream of its own, so that the host does not wait for work in the queue.
    """
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
