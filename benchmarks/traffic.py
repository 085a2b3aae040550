"""Minimum bytes that work on weights reads and writes: the lower bound of a launch.

Excludes caches, address tables, and blocks shared by ranks, whose values are read twice.
``moe_optim.commands.plan.costs`` has the lower bounds of a fused step.
"""

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_optim.formats import BlockScaledFormat

_MASTER = 4  # bytes; masters are fp32 in every format


def requantize_bytes(format: "BlockScaledFormat", numel: int, *, zeroed: bool) -> Fraction:
    """Return the bytes moved by a requantization.

    Args:
        format: format of the weights; the source is read twice if it needs an expert's amax.
        numel: owned elements.
        zeroed: True for a bf16 source, zeroed after reading; False for an fp32 source, kept.
    """
    reads = 2 if format.has_global_amax else 1
    source = 2 * reads + 2 if zeroed else _MASTER * reads
    return numel * (source + format.gathered_bytes_per_element)


def tensorwise_bytes(numel: int) -> int:
    """Return the bytes moved by a cast of ``numel`` owned elements to per-tensor FP8.

    Masters are read for the amax, and again for the data.
    """
    return numel * (2 * _MASTER + 1)


def health_bytes(format: "BlockScaledFormat", numel: int) -> Fraction:
    """Return the bytes read by a health sample of owned elements: masters and rowwise buffers."""
    return numel * (_MASTER + format.data_bytes_per_element + format.scale_bytes_per_element)


def finish_bytes(format: "BlockScaledFormat", rows: int, cols: int) -> int:
    """Return the bytes moved after the gather, per expert.

    Every source buffer is read once, and every derived one written once: transposed data, logical
    columnwise scales, and the scales of both directions in storage. Row-only formats derive
    nothing.
    """
    if format.is_row_only:
        return 0
    from moe_optim.formats import DIRECTIONS

    shape = (1, rows, cols)
    scales = {way: prod(format.scale_shape(shape, way)) for way in DIRECTIONS}
    read = sum(scales[way] for way in format.gathered_directions)
    written = sum(scales[way] * prod(format.storage_scale_repeat(way)) for way in DIRECTIONS)
    written += scales["columnwise"] if format.is_2d else 0
    moved = 2 * prod(format.data_shape(shape, "rowwise"))
    data = moved if format.columnwise_copy == "transposed" else 0
    return data + (read + written) * format.scale_itemsize
