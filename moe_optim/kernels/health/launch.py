"""The launch of a health table: one a format, which neither allocates nor waits for the device."""

import torch

from moe_optim.kernels.bound_kernel import BoundKernel, launch_all
from moe_optim.kernels.health.kernel import measure_kernel
from moe_optim.kernels.health.table import HealthLaunch, HealthTable
from moe_optim.kernels.tuning import HEALTH_ROWS, HEALTH_TILE


def launch_health(table: HealthTable) -> None:
    """Add to ``sums`` and ``amaxes`` of a table that has not moved, and that holds zeros."""
    for launch in table.launches:
        if not launch.kernels:
            launch.kernels.append(_bind(table, launch))
        launch_all(launch.kernels, table.sums.device)


def _bind(table: HealthTable, launch: HealthLaunch) -> BoundKernel:
    height, width = launch.format.rowwise_block
    return BoundKernel(
        measure_kernel,
        len(launch.tiles),
        launch.descriptors,
        launch.tiles,
        table.sums,
        table.amaxes.view(torch.int32),
        FORMAT=launch.format.name,
        BAND=launch.format.band_rows,
        HEIGHT=height,
        WIDTH=width,
        PROGRAM_ROWS=HEALTH_ROWS,
        TILE_COLS=HEALTH_TILE.cols,
        FROM_FP32=launch.source_dtype == torch.float32,
        num_warps=HEALTH_TILE.num_warps,
    )
