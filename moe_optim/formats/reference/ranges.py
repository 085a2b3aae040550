"""Quantization of a range of a weight, which may end inside a block: maxima first, then codes.

A *block row* is a strip of ``format.block_row_height`` rows. Its maxima fill one row of *slots*:
for formats that quantize both directions the C columnwise blocks, then the C / 32 rowwise blocks of
each row; for others the ceil(C / block) blocks. Slots of several ranks combine by MAX.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_optim.formats import BlockScaledFormat, QuantizedWeight
from moe_optim.formats.reference.blocks import as_magnitude, magnitude_bits
from moe_optim.formats.reference.scales import encode_elements, encode_scales


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedBlockRows:
    """Block rows of one expert that a range touches."""

    expert: int
    first_row: int
    values: Tensor
    """Weights, [n, block_row_height, C] bf16; zeros beyond the range and below the weight."""
    owned: Tensor
    """Mask of the values in the range, [n, block_row_height, C] bool."""


def owned_block_rows(
    source: Tensor, start: int, shape: tuple[int, int, int], format: BlockScaledFormat
) -> Iterator[OwnedBlockRows]:
    """Cut ``source``, elements of a weight from ``start`` on, into the block rows it touches."""
    _, rows, cols = shape
    flat, height = source.reshape(-1), format.block_row_height
    end = start + flat.numel()
    for expert in range(start // (rows * cols), -(-end // (rows * cols))):
        base = expert * rows * cols
        low, high = max(start, base) - base, min(end, base + rows * cols) - base
        first = low // (height * cols) * height
        count = -(-high // (height * cols)) - first // height
        values = torch.zeros((count, height, cols), dtype=torch.bfloat16, device=source.device)
        owned = torch.zeros_like(values, dtype=torch.bool)
        part = slice(low - first * cols, high - first * cols)
        values.view(-1)[part] = flat[base + low - start : base + high - start]
        owned.view(-1)[part] = True
        yield OwnedBlockRows(expert=expert, first_row=first, values=values, owned=owned)


def block_amaxes(values: Tensor, format: BlockScaledFormat) -> Tensor:
    """Return the amax of every block, ignoring NaN: [n, block_row_height, C] -> [n, slots] fp32."""
    magnitudes = as_magnitude(magnitude_bits(values)[0])
    columns = magnitudes.amax(1)
    length = format.block_length
    if len(format.gathered_directions) == 1:
        columns = pad(columns, (0, -columns.shape[1] % length))
        return columns.view(columns.shape[0], -1, length).amax(2)
    runs = magnitudes.view(*values.shape[:2], -1, length).amax(3)
    return torch.cat([columns, runs.flatten(1)], 1)


def encode_block_rows(
    values: Tensor, format: BlockScaledFormat, amaxes: Tensor, global_amax: Tensor
) -> dict[str, Tensor]:
    """Return the gathered buffers of block rows by name, given their maxima.

    ``values`` are [n, block_row_height, C] bf16, ``amaxes`` [n, slots] fp32. ``global_amax`` is
    fp32, 0-dim, or [n, 1] for block rows of several experts.
    """
    count, height, cols = values.shape
    length = format.block_length
    scale, factor = encode_scales(format, amaxes, global_amax)
    if len(format.gathered_directions) == 2:
        of_runs = (count, height, cols // length)
        along_rows = factor[:, cols:].view(of_runs).repeat_interleave(length, 2)
        return {
            "rowwise_data": encode_elements(format, values, along_rows),
            "rowwise_scale": scale[:, cols:].view(of_runs),
            "columnwise_data": encode_elements(format, values, factor[:, None, :cols]),
            "columnwise_scale": scale[:, None, :cols],
        }
    factor = factor.repeat_interleave(length, 1)[:, None, :cols]
    data = encode_elements(format, values, factor)
    return {"rowwise_data": data, "rowwise_scale": scale[:, None]}


def partial_amax_into(
    source: Tensor,
    start: int,
    q: QuantizedWeight,
    out: Tensor,
    *,
    block_rows: Mapping[tuple[int, int], int],
    experts: Mapping[int, int],
) -> None:
    """Write this rank's share of the maxima that several ranks contribute to.

    ``source`` contains the elements of the weight from ``start`` on. ``out`` is fp32, zero where
    nothing is owned: ``block_rows`` maps each shared block row, as (expert, first row), to its
    first slot, ``experts`` each shared expert to the slot of its amax.
    """
    for part in owned_block_rows(source, start, q.shape, q.format):
        amaxes = block_amaxes(part.values, q.format)
        for index, block_row in enumerate(amaxes):
            slot = block_rows.get((part.expert, part.first_row + index * q.format.block_row_height))
            if slot is not None:
                out[slot : slot + block_row.numel()] = block_row
        if part.expert in experts:
            out[experts[part.expert]] = amaxes.amax()


def encode_into(
    source: Tensor,
    start: int,
    q: QuantizedWeight,
    amax: Tensor,
    *,
    block_rows: Mapping[tuple[int, int], int],
    experts: Mapping[int, tuple[int, int]],
) -> None:
    """Write the data of a range, and the scales of every block row it touches, into ``q`` in place.

    ``source`` contains the elements of the weight from ``start`` on; only gathered buffers are
    written. ``amax`` holds the shared maxima of all ranks, fp32: ``block_rows`` maps each shared
    block row to its first slot, ``experts`` each shared expert to the first and end slot of its
    maxima.
    """
    height = q.format.block_row_height
    for part in owned_block_rows(source, start, q.shape, q.format):
        amaxes = block_amaxes(part.values, q.format)
        for index, maxima in enumerate(amaxes):
            slot = block_rows.get((part.expert, part.first_row + index * height))
            if slot is not None:
                maxima.copy_(amax[slot : slot + maxima.numel()])
        global_amax = amaxes.amax()
        if part.expert in experts:
            first, last = experts[part.expert]
            global_amax = amax[first:last].amax()
        if q.global_amax is not None:
            q.global_amax[part.expert] = global_amax
        for name, values in encode_block_rows(part.values, q.format, amaxes, global_amax).items():
            # values [n, rows of a block row, columns]; rows below the weight are dropped
            first_row = part.first_row * values.shape[1] // height
            buffer = getattr(q, name)[part.expert, first_row:]
            new = values.flatten(0, 1)[: len(buffer)]
            old = buffer[: len(new)]
            if name.endswith("_data"):  # all elements of a byte have one owner
                owned = part.owned.flatten(0, 1)[: len(new), :: q.format.elements_per_byte]
                new = torch.where(owned, new, old)
            old.copy_(new)
