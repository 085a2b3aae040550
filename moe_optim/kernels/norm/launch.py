"""The launches of a norm table: over the parts of each dtype, then over their sums.

They neither allocate nor wait for the device, so a CUDA graph can capture them once they have run
outside of one.
"""

from collections.abc import Iterator

import torch

from moe_optim.kernels.bound_kernel import BoundKernel, launch_all
from moe_optim.kernels.norm.kernel import add_sums_kernel, sum_squares_kernel
from moe_optim.kernels.norm.table import NormTable
from moe_optim.kernels.tuning import NORM, NORM_LANES


def launch_norm(table: NormTable) -> None:
    """Write ``squares`` and ``zeros`` of a table that kernels handle, and that has not moved."""
    if not table.kernels:
        table.kernels.extend(_bind(table))
    launch_all(table.kernels, table.squares.device)


def _bind(table: NormTable) -> Iterator[BoundKernel]:
    for dtype, parts in table.parts.items():
        yield BoundKernel(
            sum_squares_kernel,
            len(parts),
            parts,
            table.sums,
            table.zero_sums,
            FROM_FP32=dtype == torch.float32,
            COUNT_ZEROS=table.counts_zeros,
            TILE=NORM[dtype].numel,
            num_warps=NORM[dtype].num_warps,
        )
    yield BoundKernel(
        add_sums_kernel,
        len(table.squares),
        table.bounds,
        table.sums,
        table.zero_sums,
        table.squares,
        table.zeros,
        COUNT_ZEROS=table.counts_zeros,
        LANES=NORM_LANES,
        num_warps=4,
    )
