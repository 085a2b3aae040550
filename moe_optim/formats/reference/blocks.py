"""Helpers of all formats: cache-sized chunks, and maxima of magnitudes that ignore NaN."""

from collections.abc import Iterator

import torch
from torch import Tensor

INFINITY_BITS = 0x7F80
"""Bits of bf16 infinity; larger magnitudes are NaN."""

CHUNK_NUMEL = 1 << 17
"""Elements per chunk, so that temporaries fit in one core's L2 cache."""


def chunks(master: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Cut stacked experts into chunks of whole block rows, rounded to bf16.

    Args:
        master: [E, R, C] fp32 or bf16 with R % rows == 0. Rounded to bf16 first, as in TE 2.20
            quantize_master_weights, so that amax and cast see the same values.
        rows: height of a block.

    Yields:
        Slice of block rows among all E * R / rows, and their weights [n, rows, C] bf16, which may
        be written and are valid until the next chunk.
    """
    cols = master.shape[-1]
    stacked = master.reshape(-1, rows, cols)
    total = stacked.shape[0]
    height = max(1, CHUNK_NUMEL // (rows * max(cols, 1)))
    scratch = torch.empty(
        (min(height, total), rows, cols), dtype=torch.bfloat16, device=master.device
    )
    for start in range(0, total, height):
        part = slice(start, min(start + height, total))
        yield part, scratch[: part.stop - part.start].copy_(stacked[part])


def magnitude_bits(weight: Tensor) -> tuple[Tensor, bool]:
    """Return |weight| of bf16 as int16 bits in the order of magnitudes, and whether all is finite.

    NaN counts as zero, so a maximum over the bits equals TE's ``fmaxf``, which ignores NaN.
    """
    bits = weight.view(torch.int16) & 0x7FFF
    finite = not bits.numel() or int(bits.max()) < INFINITY_BITS
    return (bits if finite else bits.masked_fill(bits > INFINITY_BITS, 0)), finite


def amax_of_columns(bits: Tensor) -> Tensor:
    """Return the maxima over the rows of each block row: [n, rows, C] -> [n, C] int16."""
    return bits.amax(1)


def amax_of_runs(bits: Tensor, length: int) -> Tensor:
    """Return the maxima of runs along the last dimension: [..., C] -> [..., C / length] int16."""
    # int32: torch vectorizes reductions of the innermost dimension for it, not for int16.
    runs = bits.int().view(*bits.shape[:-1], -1, length)
    return runs.amax(-1).to(torch.int16)


def as_magnitude(bits: Tensor) -> Tensor:
    """Return the fp32 magnitudes of bf16 ``bits`` (int16)."""
    return bits.view(torch.bfloat16).float()


def spread(block_values: Tensor, length: int) -> Tensor:
    """Repeat each value over the columns of its block: [n, m] -> [n, 1, m * length]."""
    return block_values.repeat_interleave(length, dim=-1).unsqueeze(1)


def transpose_into(out: Tensor, source: Tensor) -> None:
    """Copy ``source`` [E, R, C] into ``out`` [E, C, R], transposed per expert."""
    height = 32  # rows read together; many more would thrash the cache
    for start in range(0, source.shape[1], height):
        part = slice(start, start + height)
        out[:, :, part].copy_(source[:, part].transpose(1, 2))
