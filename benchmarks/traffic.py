"""Bytes that work on weights reads and writes at least, each once: the floor of a launch.

Caches, tables of addresses and blocks that lie on several ranks, whose values are read once more,
are left out. ``moe_optim.commands.plan.costs`` has the floors of a fused step.
"""

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_optim.formats import BlockScaledFormat

_MASTER = 4  # bytes; masters are fp32 in every format


def requantize_bytes(format: "BlockScaledFormat", numel: int, *, zeroed: bool) -> Fraction:
    """Return the bytes that a requantization has to move.

    Args:
        format: read twice where an amax of the expert precedes the codes.
        numel: elements owned.
        zeroed: whether the source is bf16 and left as zeros, and not fp32 and kept.
    """
    reads = 2 if format.has_global_amax else 1
    source = 2 * reads + 2 if zeroed else _MASTER * reads
    return numel * (source + format.gathered_bytes_per_element)


def tensorwise_bytes(numel: int) -> int:
    """Return the bytes that a cast to FP8 with one scale a weight has to move.

    Masters are read for their amax, and once more for their codes.

    Args:
        numel: elements owned.
    """
    return numel * (2 * _MASTER + 1)


def health_bytes(format: "BlockScaledFormat", numel: int) -> Fraction:
    """Return the bytes that a look at owned elements reads: masters and rowwise buffers."""
    return numel * (_MASTER + format.data_bytes_per_element + format.scale_bytes_per_element)


def finish_bytes(format: "BlockScaledFormat", rows: int, cols: int) -> int:
    """Return the bytes that have to move after the gather, for one expert.

    Every buffer that is needed is read once, and every one that follows from it is written once:
    transposed data, logical columnwise scales, and the scales of both directions in storage.
    """
    from moe_optim.formats import DIRECTIONS

    shape = (1, rows, cols)
    scales = {way: prod(format.scale_shape(shape, way)) for way in DIRECTIONS}
    read = sum(scales[way] for way in format.gathered_directions)
    written = sum(scales[way] * prod(format.storage_scale_repeat(way)) for way in DIRECTIONS)
    written += scales["columnwise"] if format.is_2d else 0
    moved = 2 * prod(format.data_shape(shape, "rowwise"))
    data = moved if format.columnwise_copy == "transposed" else 0
    return data + (read + written) * format.scale_itemsize
