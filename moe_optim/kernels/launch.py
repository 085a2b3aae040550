"""The launches of a table: maxima, codes, and what is derived after a gather.

None of them allocates or waits for the device, so a CUDA graph can capture them once they have run
outside of one.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_optim.kernels.amax import cut_block_row_amax_kernel, expert_amax_kernel
from moe_optim.kernels.bound_kernel import BoundKernel, launch_all
from moe_optim.kernels.finish_gather import finish_gather_kernel
from moe_optim.kernels.finish_table import FinishTable
from moe_optim.kernels.launch_table import LaunchTable
from moe_optim.kernels.requantize_blocks import requantize_blocks_kernel
from moe_optim.kernels.requantize_mxfp8 import requantize_mxfp8_kernel
from moe_optim.kernels.tuning import EXPERT_AMAX, SCALE_TILES

NO_STEP = {"GRADIENT_FP32": False, "MOMENTS_FP32": False, "DECOUPLED": False}


def launch_amax(table: LaunchTable) -> None:
    """Fill the amax slots of experts, if the format has them, and of cut block rows."""
    _launch(table, _bind_amax)


def launch_encode(table: LaunchTable) -> None:
    """Rewrite the buffers that travel from the sources; zero sources and gaps if the table says so.

    One launch for all whole block rows, and one for the cut ones if there are any.
    """
    _launch(table, _bind_encode)


def launch_cut_amax(table: LaunchTable) -> None:
    """Fill the amax slots of cut block rows alone."""
    _launch(table, _bind_cut_amax)


def launch_encode_cut(table: LaunchTable) -> None:
    """Rewrite the buffers of cut block rows alone."""
    _launch(table, _bind_encode_cut)


def launch_finish(table: FinishTable) -> None:
    """Make all columnwise copies of a table, and expand its scales, in one launch."""
    _launch(table, _bind_finish)


def _launch[Table: (LaunchTable, FinishTable)](
    table: Table, bind: Callable[[Table], Iterator[BoundKernel]]
) -> None:
    kernels = table.kernels.get(bind.__name__)
    if kernels is None:
        kernels = table.kernels[bind.__name__] = tuple(bind(table))
    launch_all(kernels, table.tiles.device)


def _bind_amax(table: LaunchTable) -> Iterator[BoundKernel]:
    from_fp32 = table.source_dtype == torch.float32
    if table.format.has_global_amax:
        yield BoundKernel(
            expert_amax_kernel,
            len(table.amax_parts),
            table.descriptors,
            table.amax_parts,
            table.amax,
            FROM_FP32=from_fp32,
            ALIGNED=table.aligned,
            TILE=EXPERT_AMAX.numel,
            num_warps=EXPERT_AMAX.num_warps,
        )
    yield from _bind_cut_amax(table)


def _bind_cut_amax(table: LaunchTable) -> Iterator[BoundKernel]:
    if table.num_cut_tiles:
        yield BoundKernel(
            cut_block_row_amax_kernel,
            table.num_cut_tiles,
            table.descriptors,
            table.cut_tiles,
            table.amax,
            BLOCK_ROW=table.format.block_row_height,
            BLOCK=table.format.rowwise_block[1],
            SQUARE=table.format.is_2d,
            TILE_COLS=table.tile.cols,
            FROM_FP32=table.source_dtype == torch.float32,
            num_warps=table.tile.num_warps,
        )


def _bind_encode(table: LaunchTable) -> Iterator[BoundKernel]:
    if len(table.tiles):
        yield encoding_kernel(table, table.tiles, table.num_tiles, table.aligned, CUT=False)
    yield from _bind_encode_cut(table)


def _bind_encode_cut(table: LaunchTable) -> Iterator[BoundKernel]:
    if table.num_cut_tiles:
        tiles = table.cut_tiles
        yield encoding_kernel(table, tiles, table.num_cut_tiles, table.aligned, CUT=True)


def encoding_kernel(
    table: LaunchTable,
    tiles: Tensor,
    num_tiles: int,
    aligned: bool,
    *states: Tensor,
    CUT: bool,
    **of_step: bool,
) -> BoundKernel:
    """Bind the kernel that encodes tiles of the members of a table.

    Args:
        table: members, and how their buffers lie.
        tiles: one row a program.
        num_tiles: how many of them are of members, and not of gaps.
        aligned: whether everything starts at multiples of 16 bytes.
        *states: states, hyper-parameters and clip factors where a step comes first.
        CUT: the maxima of the tiles are exchanged.
        **of_step: dtypes of gradients and moments, and the kind of decay, where there are states.
    """
    format = table.format
    kernel = requantize_blocks_kernel if format.is_2d else requantize_mxfp8_kernel
    of_format: dict[str, str | int] = {}
    if format.is_2d:
        block_row = format.block_row_height
        slab = table.tile.slab or block_row
        of_format = {"FORMAT": format.name, "BLOCK": block_row, "SLAB": slab}
    return BoundKernel(
        kernel,
        len(tiles),
        table.descriptors,
        tiles,
        table.amax,
        num_tiles,
        *(states or (None, None, None)),
        **of_format,
        TILE_COLS=table.tile.cols,
        FROM_FP32=table.source_dtype == torch.float32,
        MASKED=table.masked,
        ALIGNED=aligned,
        CUT=CUT,
        ZERO=table.zeroes,
        STEP=bool(states),
        **(of_step or NO_STEP),
        num_warps=table.tile.num_warps,
        registers=table.tile.registers,
    )


def _bind_finish(table: FinishTable) -> Iterator[BoundKernel]:
    yield BoundKernel(
        finish_gather_kernel,
        len(table.tiles),
        table.copies,
        table.tiles,
        table.num_transposes,
        PACK=table.pack,
        WORDS=table.tile.words,
        PACKS=table.tile.packs,
        BLOCK_ROWS=SCALE_TILES[table.repeats][0],
        BLOCK_COLS=SCALE_TILES[table.repeats][1],
        REPEATS=table.repeats,
        FP32_SCALES=table.fp32_scales,
        ALIGNED=table.aligned,
        ALIGNED_SCALES=table.aligned_scales,
        num_warps=table.tile.num_warps,
    )
