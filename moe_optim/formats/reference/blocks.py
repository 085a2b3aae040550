"""Helpers of all formats: chunks that stay in a cache, and maxima of magnitudes that ignore NaN."""

from collections.abc import Iterator

import torch
from torch import Tensor

INFINITY_BITS = 0x7F80
"""Bits of a bf16 infinity. Larger magnitudes are NaN."""

CHUNK_NUMEL = 1 << 17
"""Elements handled at a time, so that temporaries stay in one core's second-level cache."""


def chunks(master: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Cut stacked experts into chunks of whole block rows, rounded to bf16.

    Args:
        master: [E, R, C] fp32 or bf16 with R % rows == 0. Rounded to bf16 first, as TE 2.20
            quantize_master_weights does, so that the amax sees what the cast sees.
        rows: height of a block.

    Yields:
        Indices of block rows among all E * R / rows, and the weights [n, rows, C] bf16 of these.
        The weights are valid until the next chunk is taken, and may be written.
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
    """Return |weight| as integers in the order of the magnitudes, NaN counting as zero.

    A maximum over them is TE's ``fmaxf`` over magnitudes: it never sees a NaN.

    Args:
        weight: [..., rows, C] bf16.

    Returns:
        int16 bits of the same shape, at most ``INFINITY_BITS``; and whether all is finite.
    """
    bits = weight.view(torch.int16) & 0x7FFF
    finite = not bits.numel() or int(bits.max()) < INFINITY_BITS
    return (bits if finite else bits.masked_fill(bits > INFINITY_BITS, 0)), finite


def amax_of_columns(bits: Tensor) -> Tensor:
    """Return the maxima over the rows of each block row: [n, rows, C] -> [n, C] int16."""
    return bits.amax(1)


def amax_of_runs(bits: Tensor, length: int) -> Tensor:
    """Return the maxima of runs along the last dimension: [..., C] -> [..., C / length] int16."""
    # int32, because reducing the innermost dimension is vectorised for it and not for int16.
    runs = bits.int().view(*bits.shape[:-1], -1, length)
    return runs.amax(-1).to(torch.int16)


def as_magnitude(bits: Tensor) -> Tensor:
    """Return the fp32 magnitudes that bf16 ``bits`` (int16) stand for."""
    return bits.view(torch.bfloat16).float()


def spread(block_values: Tensor, length: int) -> Tensor:
    """Repeat each value over the columns of its block: [n, m] -> [n, 1, m * length]."""
    return block_values.repeat_interleave(length, dim=-1).unsqueeze(1)


def transpose_into(out: Tensor, source: Tensor) -> None:
    """Copy ``source`` [E, R, C] into ``out`` [E, C, R], its transpose for every expert."""
    height = 32  # rows read side by side; many more would push each other out of the cache
    for start in range(0, source.shape[1], height):
        part = slice(start, start + height)
        out[:, :, part].copy_(source[:, part].transpose(1, 2))
