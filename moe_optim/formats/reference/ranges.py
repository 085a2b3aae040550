"""Quantization of a range of a weight, which may end inside a block: maxima first, then codes.

Slots of several ranks (:mod:`moe_optim.formats.reference.blocks`) combine by MAX.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat, QuantizedWeight
from moe_optim.formats.reference.blocks import block_amaxes, cut_experts, encode_block_rows


def owned_block_rows(
    source: Tensor, start: int, shape: tuple[int, int, int], format: BlockScaledFormat
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Cut ``source``, elements of a weight from ``start`` on, into the block rows it touches.

    Yields an expert, the first row in it, weights [n, block_row_height, C] bf16, zero beyond the
    range and below the weight, and the mask of those in the range.
    """
    (_, rows, cols), height = shape, format.block_row_height
    for expert, place, part in cut_experts(source, start, rows * cols):
        first = place.start // (height * cols) * height
        count = -(-place.stop // (height * cols)) - first // height
        values = torch.zeros((count, height, cols), dtype=torch.bfloat16, device=source.device)
        owned = torch.zeros_like(values, dtype=torch.bool)
        there = slice(place.start - first * cols, place.stop - first * cols)
        values.view(-1)[there] = part
        owned.view(-1)[there] = True
        yield expert, first, values, owned


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
    for expert, first_row, values, _ in owned_block_rows(source, start, q.shape, q.format):
        amaxes = block_amaxes(values, q.format)
        for index, block_row in enumerate(amaxes):
            slot = block_rows.get((expert, first_row + index * q.format.block_row_height))
            if slot is not None:
                out[slot : slot + block_row.numel()] = block_row
        if expert in experts:
            out[experts[expert]] = amaxes.amax()


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
    for expert, first_row, values, owned in owned_block_rows(source, start, q.shape, q.format):
        amaxes = block_amaxes(values, q.format)
        for index, maxima in enumerate(amaxes):
            slot = block_rows.get((expert, first_row + index * height))
            if slot is not None:
                maxima.copy_(amax[slot : slot + maxima.numel()])
        global_amax = amaxes.amax()
        if expert in experts:
            first, last = experts[expert]
            global_amax = amax[first:last].amax()
        if q.global_amax is not None:
            q.global_amax[expert] = global_amax
        for name, encoded in encode_block_rows(values, q.format, amaxes, global_amax).items():
            # [n, rows of a block row, columns]; rows below the weight are dropped
            buffer = getattr(q, name)[expert, first_row * encoded.shape[1] // height :]
            new = encoded.flatten(0, 1)[: len(buffer)]
            old = buffer[: len(new)]
            if name.endswith("_data"):  # all elements of a byte have one owner
                mine = owned.flatten(0, 1)[: len(new), :: q.format.elements_per_byte]
                new = torch.where(mine, new, old)
            old.copy_(new)
