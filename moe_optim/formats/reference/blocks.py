"""Block rows of any format: maxima, bytes given all maxima, and buffers derived from others.

A *block row* is a strip of ``format.block_row_height`` rows. Its maxima fill one row of *slots*:
for formats that quantize both directions the C columnwise blocks, then the C / 32 rowwise blocks of
each row; for others the ceil(C / block) blocks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_optim.formats import BlockScaledFormat, Direction, QuantizedWeight
from moe_optim.formats.reference.scales import encode_elements, encode_scales

INFINITY_BITS = 0x7F80
"""Bits of bf16 infinity; larger magnitudes are NaN."""

CHUNK_NUMEL = 1 << 17
"""Elements per chunk, so that temporaries fit in one core's L2 cache."""


def quantize_blocks_into(master: Tensor, out: QuantizedWeight) -> None:
    """Write the gathered buffers of ``master`` [E, R, C] into contiguous ``out``."""
    format, (experts, rows, _) = out.format, master.shape
    height = format.block_row_height
    if rows % height:  # zero padding changes no amax
        padded = pad(master, (0, 0, 0, -rows % height))
        whole = QuantizedWeight.empty(format, padded.shape, device=master.device)
        quantize_blocks_into(padded, whole)
        out.rowwise_data.copy_(whole.rowwise_data[:, :rows])
        out.rowwise_scale.copy_(whole.rowwise_scale)
        return
    count = experts * rows // height
    global_amax = torch.zeros((count, 1), dtype=torch.float32, device=master.device)
    found: Tensor | None = None
    if out.global_amax is not None:
        found = torch.cat([block_amaxes(weight, format) for _, weight in _chunks(master, height)])
        out.global_amax.copy_(found.view(experts, -1).amax(1))
        global_amax = out.global_amax.repeat_interleave(count // experts).view(-1, 1)
    buffers = {
        name: buffer.view(count, -1, buffer.shape[-1])
        for name, buffer in out.gathered_buffers().items()
        if name != "global_amax"
    }
    for part, weight in _chunks(master, height):
        amaxes = block_amaxes(weight, format) if found is None else found[part]
        for name, values in encode_block_rows(weight, format, amaxes, global_amax[part]).items():
            buffers[name][part] = values


def _chunks(master: Tensor, height: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield places among all E * R / height block rows, and weights [n, height, C] bf16.

    Rounded to bf16 first, as in TE 2.20 quantize_master_weights, so that amax and cast see the same
    values. Weights are valid until the next chunk.
    """
    stacked = master.reshape(-1, height, master.shape[-1])
    count = max(1, CHUNK_NUMEL // (height * max(master.shape[-1], 1)))
    shape = stacked[:count].shape
    scratch = torch.empty(shape, dtype=torch.bfloat16, device=master.device)
    for start in range(0, len(stacked), count):
        part = slice(start, min(start + count, len(stacked)))
        yield part, scratch[: part.stop - part.start].copy_(stacked[part])


def block_amaxes(values: Tensor, format: BlockScaledFormat) -> Tensor:
    """Return the amax of every block, ignoring NaN: [n, block_row_height, C] -> [n, slots] fp32."""
    bits, length = magnitude_bits(values), format.block_length
    columns = bits.amax(1) if bits.shape[1] > 1 else bits[:, 0]
    if len(format.gathered_directions) == 2:
        return as_magnitude(torch.cat([columns, _amax_of_runs(bits, length).flatten(1)], 1))
    if partial := columns.shape[1] % length:
        columns = pad(columns, (0, length - partial))
    return as_magnitude(_amax_of_runs(columns, length))


def magnitude_bits(weight: Tensor) -> Tensor:
    """Return |weight| of bf16 as int16 bits in the order of magnitudes.

    NaN counts as zero, so a maximum over the bits equals TE's ``fmaxf``, which ignores NaN.
    """
    bits = weight.view(torch.int16) & 0x7FFF
    has_nan = bits.numel() and int(bits.max()) > INFINITY_BITS
    return bits.masked_fill_(bits > INFINITY_BITS, 0) if has_nan else bits


def _amax_of_runs(bits: Tensor, length: int) -> Tensor:
    # int32: torch vectorizes reductions of the innermost dimension for it, not for int16
    return bits.int().view(*bits.shape[:-1], -1, length).amax(-1).to(torch.int16)


def as_magnitude(bits: Tensor) -> Tensor:
    """Return the fp32 magnitudes of bf16 ``bits`` (int16)."""
    return bits.view(torch.bfloat16).float()


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
    if format.is_2d:  # edge blocks may be partial
        factor = factor.repeat_interleave(length, 1)[:, None, :cols]
        data = encode_elements(format, values, factor)
        return {"rowwise_data": data, "rowwise_scale": scale[:, None]}
    of_rows = slice(factor.shape[1] - height * cols // length, None)
    of_runs = (count, height, cols // length)
    runs = values.view(*of_runs, length)
    data = encode_elements(format, runs, factor[:, of_rows].reshape(*of_runs, 1)).flatten(2)
    encoded = {"rowwise_data": data, "rowwise_scale": scale[:, of_rows].reshape(of_runs)}
    if not format.is_row_only:
        encoded |= {
            "columnwise_data": encode_elements(format, values, factor[:, None, :cols]),
            "columnwise_scale": scale[:, None, :cols],
        }
    return encoded


@torch.no_grad()
def expert_amax_into(out: Tensor, source: Tensor, start: int, numel: int) -> None:
    """Raise the amax of every expert that a range of a weight touches, in place.

    Values are rounded to bf16 first and NaN counts as zero. The maximum over any ranges that cover
    a weight is the amax of whole experts.

    Args:
        out: [E] fp32, replaced by the maximum of its value and the computed amax.
        source: fp32 or bf16, the elements of the weight from ``start`` on in row-major order.
        start: first element of the source, counted in the weight.
        numel: elements of one expert.
    """
    for expert, _, values in cut_experts(source, start, numel):
        bits = magnitude_bits(values.bfloat16())
        out[expert] = torch.maximum(out[expert], as_magnitude(bits.amax()))


def cut_experts(source: Tensor, start: int, numel: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield each expert that a range touches, the elements of the expert, and their values.

    ``source`` contains the elements of the weight from ``start`` on, ``numel`` per expert.
    """
    flat = source.reshape(-1)
    end = start + flat.numel()
    for expert in range(start // numel, -(-end // numel)) if start < end else ():
        base = expert * numel
        low, high = max(start, base), min(end, base + numel)
        yield expert, slice(low - base, high - base), flat[low - start : high - start]


# Derived buffers


def transpose_into(out: Tensor, source: Tensor) -> None:
    """Copy ``source`` [E, R, C] into ``out`` [E, C, R], transposed per expert."""
    height = 32  # rows read together; many more would thrash the cache
    for start in range(0, source.shape[1], height):
        part = slice(start, start + height)
        out[:, :, part].copy_(source[:, part].transpose(1, 2))


def derive_into(q: QuantizedWeight) -> None:
    """Write the columnwise buffers of ``q`` that follow from its rowwise ones, in place.

    Does nothing for formats that gather every direction they store.
    """
    if q.format.gathered_directions == q.format.directions:
        return
    if q.format.columnwise_copy == "transposed":
        packed = q.format.elements_per_byte == 2
        transpose_into(q.columnwise_data, _pair_rows(q.rowwise_data) if packed else q.rowwise_data)
    q.columnwise_scale.copy_(q.rowwise_scale.transpose(1, 2))


def expand_scale_into(q: QuantizedWeight, direction: Direction, out: Tensor) -> None:
    """Write the scales of ``direction`` as Transformer Engine stores them, one per line of a block.

    Reads the rowwise scales of ``q``, or both for 1-D formats. ``out`` is [E, ...] of
    ``q.format.storage_scale_shape`` and ``q.format.scale_dtype``; padding is not written.
    """
    scale = q.rowwise_scale if q.format.is_2d else q.scale(direction)
    if q.format.transposes(direction):
        scale = scale.transpose(1, 2)
    down, across = q.format.storage_scale_repeat(direction)
    lines = scale.repeat_interleave(down, 1).repeat_interleave(across, 2)
    out[:, : lines.shape[1], : lines.shape[2]].copy_(lines)


def _pair_rows(data: Tensor) -> Tensor:
    """Repack two columns per byte as two rows per byte: [E, R, C/2] -> [E, R/2, C] uint8."""
    even, odd = data[:, 0::2], data[:, 1::2]
    pairs = data.new_empty((data.shape[0], data.shape[1] // 2, 2 * data.shape[2]))
    pairs[:, :, 0::2] = (even & 0xF) | (odd << 4)
    pairs[:, :, 1::2] = (even >> 4) | (odd & 0xF0)
    return pairs
