"""Quantization of a part of a weight, cut in rows and columns: maxima first, then codes.

Zeros pad a part to whole blocks. The padded part is then an independent weight, except for the
maxima of blocks that continue beyond the part.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat, QuantizedWeight, round_up
from moe_optim.formats.reference.blocks import block_amaxes, derive_into, encode_block_rows


def pad_part(part: Tensor, start: tuple[int, int], format: BlockScaledFormat) -> Tensor:
    """Return a part rounded to bf16, zero-padded to the edges of the blocks that it touches.

    ``start`` is the first row and column of ``part`` [E, r, c] in the weight. The result [E, R',
    C'] starts at :func:`padded_start`; R' is a multiple of a block row, C' of a block.
    """
    height, length = format.block_row_height, format.block_length
    top, left = start[0] % height, start[1] % length
    experts, rows, cols = part.shape
    shape = (experts, round_up(top + rows, height), round_up(left + cols, length))
    padded = torch.zeros(shape, dtype=torch.bfloat16, device=part.device)
    padded[:, top : top + rows, left : left + cols] = part
    return padded


def padded_start(start: tuple[int, int], format: BlockScaledFormat) -> tuple[int, int]:
    """Return the first row and column of a padded part, counted in the weight."""
    height, length = format.block_row_height, format.block_length
    return start[0] // height * height, start[1] // length * length


def part_maxima(padded: Tensor, format: BlockScaledFormat) -> dict[str, Tensor]:
    """Return the fp32 amax of every block of a padded part, by the buffer computed from it.

    NaN counts as zero. Shapes are [E, R' / block rows, C' / block columns] for each gathered
    direction, and [E, 1, 1] for ``global_amax``, if the format has one.
    """
    experts, rows, cols = padded.shape
    height, length = format.block_row_height, format.block_length
    amaxes = block_amaxes(padded.view(-1, height, cols), format)
    if len(format.gathered_directions) == 1:
        blocks = amaxes.view(experts, rows // height, cols // length)
        found = {"rowwise_scale": blocks}
        if format.has_global_amax:
            found["global_amax"] = blocks.amax((1, 2), keepdim=True)
        return found
    columns, runs = amaxes[:, :cols], amaxes[:, cols:]
    return {
        "rowwise_scale": runs.reshape(experts, rows, cols // length),
        "columnwise_scale": columns.reshape(experts, rows // height, cols),
    }


def encode_padded(
    padded: Tensor, format: BlockScaledFormat, maxima: Mapping[str, Tensor]
) -> QuantizedWeight:
    """Return all buffers of a padded part, given the :func:`part_maxima` of the whole weight."""
    experts, rows, cols = padded.shape
    block_rows = padded.view(-1, format.block_row_height, cols)
    blocks = maxima["rowwise_scale"].reshape(len(block_rows), -1)
    if "columnwise_scale" in maxima:
        blocks = torch.cat([maxima["columnwise_scale"].reshape(len(block_rows), -1), blocks], 1)
    global_amax = maxima.get("global_amax", padded.new_zeros(experts, 1, 1, dtype=torch.float32))
    of_block_rows = global_amax.expand(experts, rows // format.block_row_height, 1).reshape(-1, 1)
    out = QuantizedWeight.empty(format, padded.shape, device=padded.device)
    for name, buffer in encode_block_rows(block_rows, format, blocks, of_block_rows).items():
        target: Tensor = getattr(out, name)
        target.copy_(buffer.reshape(target.shape))
    if out.global_amax is not None:
        out.global_amax.copy_(global_amax.view(-1))
    derive_into(out)
    return out
