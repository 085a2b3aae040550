"""Buffers derived after a gather, in plain torch: columnwise copies and padded scales."""

from torch import Tensor

from moe_optim.formats import Direction, QuantizedWeight
from moe_optim.formats.reference.blocks import transpose_into


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
