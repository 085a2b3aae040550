"""The launches of a table: maxima, codes, and what is derived after a gather.

None of them allocates or waits for the device, so a CUDA graph can capture them once they have run
outside of one.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from moe_optim.kernels.amax import cut_band_amax_kernel, expert_amax_kernel
from moe_optim.kernels.finish_gather import finish_gather_kernel
from moe_optim.kernels.finish_table import FinishTable
from moe_optim.kernels.launch_table import LaunchTable
from moe_optim.kernels.requantize_blocks import requantize_blocks_kernel
from moe_optim.kernels.requantize_mxfp8 import requantize_mxfp8_kernel


def launch_amax(table: LaunchTable) -> None:
    """Fill the amax slots of the experts, where the format has them, and those of cut bands."""
    if not table.format.has_global_amax and not table.num_cut_tiles:
        return
    from_fp32 = table.source_dtype == torch.float32
    with _on(table.descriptors.device):
        if table.format.has_global_amax:
            expert_amax_kernel[(len(table.amax_parts),)](
                table.descriptors,
                table.amax_parts,
                table.amax,
                FROM_FP32=from_fp32,
                ALIGNED=table.aligned,
                num_warps=4,
            )
        if table.num_cut_tiles:
            cut_band_amax_kernel[(table.num_cut_tiles,)](
                table.descriptors,
                table.cut_tiles,
                table.amax,
                BAND=table.format.band_rows,
                BLOCK=table.format.rowwise_block[1],
                SQUARE=table.format.is_2d,
                TILE_COLS=table.tile.cols,
                FROM_FP32=from_fp32,
                num_warps=table.tile.num_warps,
            )


def launch_encode(table: LaunchTable) -> None:
    """Rewrite the planes that travel from the sources; zero sources and gaps if the table says so.

    One launch for all whole bands, and one for the cut ones if there are any.
    """
    with _on(table.descriptors.device):
        if table.num_programs:
            _launch_encode(table, cut=False)
        if table.num_cut_tiles:
            _launch_encode(table, cut=True)


def _launch_encode(table: LaunchTable, *, cut: bool) -> None:
    tiles = table.cut_tiles if cut else table.tiles
    arguments = (table.descriptors, tiles, table.amax, len(tiles) if cut else table.num_tiles)
    options = {
        "TILE_COLS": table.tile.cols,
        "FROM_FP32": table.source_dtype == torch.float32,
        "MASKED": table.masked,
        "ALIGNED": table.aligned,
        "CUT": cut,
        "ZERO": table.zeroes,
        "num_warps": table.tile.num_warps,
    }
    if table.format.is_2d:
        requantize_blocks_kernel[(len(tiles),)](
            *arguments,
            FORMAT=table.format.name,
            BLOCK=table.format.band_rows,
            **options,
        )
    else:
        requantize_mxfp8_kernel[(len(tiles),)](*arguments, **options)


def launch_finish(table: FinishTable) -> None:
    """Make all columnwise copies of a table, and expand its scales, in one launch."""
    with _on(table.tiles.device):
        finish_gather_kernel[(table.tiles.shape[0],)](
            table.copies,
            table.tiles,
            table.num_transposes,
            PACK=table.pack,
            WORDS=table.tile.words,
            PACKS=table.tile.packs,
            FP32_SCALES=table.fp32_scales,
            ALIGNED=table.aligned,
            ALIGNED_SCALES=table.aligned_scales,
            num_warps=table.tile.num_warps,
        )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context on ``device``, which is where most callers are already."""
    here = device.type != "cuda" or torch.cuda.current_device() == device.index
    return nullcontext() if here else torch.cuda.device(device)
