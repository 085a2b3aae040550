"""The launches of fake quantization: one forward, one backward, whatever the number of experts."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_optim.kernels import tuning
from moe_optim.kernels.bound_kernel import BoundKernel, current_device
from moe_optim.kernels.fake.kernel import clip_gradient_kernel, fake_quantize_kernel
from moe_optim.kernels.fake.table import SpanTable
from moe_optim.kernels.tuning import FlatTile


def launch_fake_quantize(
    table: SpanTable, amax: Tensor, result: Tensor, codes: tuple[float, float], *, e4m3: bool
) -> None:
    """Write the values of all experts as their grids have them.

    Args:
        table: of the values.
        amax: [num_experts], or [1] for all of them.
        result: as many elements as all experts have, contiguous, of their dtype.
        codes: the smallest and the largest.
        e4m3: whether the grid is E4M3, and not integers.
    """
    given = (table.spans, amax, int(amax.numel() > 1), result, *codes)
    _launch(fake_quantize_kernel, tuning.FAKE_FORWARD, table, given, (("E4M3", e4m3),))


def launch_clip_gradient(table: SpanTable, amax: Tensor, result: Tensor) -> None:
    """Write the gradients of all experts, zero where a value is beyond its amax.

    Args:
        table: of values and gradients.
        amax: [num_experts], or [1] for all of them.
        result: as many elements as all experts have, contiguous, of their dtype.
    """
    given = (table.spans, amax, int(amax.numel() > 1), result)
    _launch(clip_gradient_kernel, tuning.FAKE_BACKWARD, table, given)


def _launch(
    kernel: Any,
    tile: FlatTile,
    table: SpanTable,
    given: tuple[Any, ...],
    constants: tuple[tuple[str, Any], ...] = (),
) -> None:
    _, amax, _, result, *_ = given
    with current_device(result.device):
        bound = _bind(
            kernel,
            tile,
            (-(-table.longest // tile.numel), len(table.spans)),
            (("ALIGNED", table.aligned), *constants),
            (amax.dtype, result.dtype, result.device),
        )
        bound(*given)


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
