"""The launches of a health table, which neither allocate nor wait for the device."""

from collections.abc import Iterator

import torch

from moe_optim.kernels.bound_kernel import BoundKernel, launch_all
from moe_optim.kernels.health.kernel import add_parts_kernel, measure_kernel
from moe_optim.kernels.health.table import HealthLaunch, HealthTable
from moe_optim.kernels.tuning import HEALTH_ROWS, HEALTH_TILE


def launch_health(table: HealthTable) -> None:
    """Add to ``sums`` and ``amaxes`` of a table that has not moved, and that holds zeros."""
    for launch in table.launches:
        if not launch.kernels:
            launch.kernels.extend(_bind(table, launch))
        launch_all(launch.kernels, table.sums.device)


def _bind(table: HealthTable, launch: HealthLaunch) -> Iterator[BoundKernel]:
    height, width = launch.format.rowwise_block
    for tiles, is_whole in ((launch.whole_tiles, True), (launch.cut_tiles, False)):
        if len(tiles):
            yield BoundKernel(
                measure_kernel,
                len(tiles),
                launch.descriptors,
                tiles,
                launch.parts,
                table.amaxes.view(torch.int32),
                FORMAT=launch.format.name,
                HEIGHT=height,
                WIDTH=width,
                PROGRAM_ROWS=HEALTH_ROWS,
                TILE_COLS=HEALTH_TILE.cols,
                STRIP=HEALTH_TILE.slab,
                FROM_FP32=launch.source_dtype == torch.float32,
                WHOLE=is_whole,
                num_warps=HEALTH_TILE.num_warps,
            )
    yield BoundKernel(
        add_parts_kernel,
        len(launch.descriptors),
        launch.descriptors,
        launch.bounds,
        launch.parts,
        table.sums,
        LANES=16,
        COLUMNS=64,
        num_warps=4,
    )
