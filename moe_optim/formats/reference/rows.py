"""Row-only formats: scales of blocks along a row, one direction for the GEMMs of both."""

import torch
from torch import Tensor

from moe_optim.formats import QuantizedWeight
from moe_optim.formats.reference.blocks import amax_of_runs, as_magnitude, chunks, magnitude_bits
from moe_optim.formats.reference.scales import encode_elements, encode_scales


def quantize_into(master: Tensor, out: QuantizedWeight) -> None:
    """Write all buffers of ``master`` [E, R, C] into contiguous ``out``."""
    experts, rows, cols = master.shape
    length = out.format.block_length
    amax = torch.empty((experts * rows, cols // length), dtype=torch.float32, device=master.device)
    for part, weight in chunks(master, 1):  # [n, 1, C]
        amax[part] = as_magnitude(amax_of_runs(magnitude_bits(weight)[0][:, 0], length))
    blocks, global_amax = amax.view(experts, rows, -1), None
    if out.global_amax is not None:
        out.global_amax.copy_(blocks.amax((1, 2)))
        global_amax = out.global_amax.view(-1, 1, 1)
    scale, factor = encode_scales(out.format, blocks, global_amax)
    out.rowwise_scale.copy_(scale)
    data, factor = out.rowwise_data.view(experts * rows, -1), factor.view(*amax.shape, 1)
    for part, weight in chunks(master, 1):
        runs = weight.view(len(weight), -1, length)
        data[part] = encode_elements(out.format, runs, factor[part]).flatten(1)
