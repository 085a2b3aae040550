"""The launches of a tensorwise table: those that find amaxes, and those that cast with them.

They neither allocate nor wait for the device, so a CUDA graph can capture them once they have run
outside of one.
"""

from collections.abc import Iterator

from moe_optim.kernels.bound_kernel import BoundKernel, launch_all
from moe_optim.kernels.tensorwise.kernel import (
    cast_kernel,
    part_amax_kernel,
    scale_kernel,
    weight_amax_kernel,
)
from moe_optim.kernels.tensorwise.table import TensorwiseTable
from moe_optim.kernels.tuning import TENSORWISE_LANES, TENSORWISE_TILE


def launch_amax(table: TensorwiseTable) -> None:
    """Write ``amaxes`` of what this rank owns; kernels handle the table, and it has not moved."""
    if not table.finding:
        table.finding.extend(_bind_amax(table))
    launch_all(table.finding, table.amaxes.device)


def launch_cast(table: TensorwiseTable) -> None:
    """Write scales of ``amaxes``, and the codes of what this rank owns."""
    if not table.casting:
        table.casting.extend(_bind_cast(table))
    launch_all(table.casting, table.amaxes.device)


def _bind_amax(table: TensorwiseTable) -> Iterator[BoundKernel]:
    for aligned, parts in table.parts.items():
        yield BoundKernel(
            part_amax_kernel,
            len(parts),
            parts,
            table.slots,
            ALIGNED=aligned,
            TILE=TENSORWISE_TILE.numel,
            num_warps=TENSORWISE_TILE.num_warps,
        )
    yield BoundKernel(
        weight_amax_kernel,
        len(table.weights),
        table.bounds,
        table.slots,
        table.amaxes,
        LANES=TENSORWISE_LANES,
        num_warps=1,
    )


def _bind_cast(table: TensorwiseTable) -> Iterator[BoundKernel]:
    yield BoundKernel(
        scale_kernel, len(table.weights), table.amaxes, table.scales, table.inverses, num_warps=1
    )
    for aligned, parts in table.parts.items():
        yield BoundKernel(
            cast_kernel,
            len(parts),
            parts,
            table.scales,
            ALIGNED=aligned,
            TILE=TENSORWISE_TILE.numel,
            num_warps=TENSORWISE_TILE.num_warps,
        )
