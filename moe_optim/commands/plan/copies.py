"""Memory of the copies of bf16 experts that ``compute`` makes for their GEMMs."""

from math import prod

from moe_optim.commands.plan.experts import PlannedExperts, WeightShape
from moe_optim.formats import FORMATS, BlockScaledFormat, Direction

_BF16 = 2  # bytes


def copy_bytes(experts: PlannedExperts, compute: str) -> int:
    """Return the bytes of all copies on one rank, while a step runs.

    Transformer Engine's experts keep bf16 values of every layer; portable ones dequantize one
    linear at a time. Block-scaled formats are quantized into bytes of their own, which stay, unless
    they are row-only and of Transformer Engine's experts.
    """
    format = FORMATS.get(compute)
    numels = [prod(shape) for _, shape in experts.weights]
    values = _BF16 * (max(numels) if experts.is_portable else experts.layers * sum(numels))
    if format is None or (format.is_row_only and not experts.is_portable):
        return values
    stored = sum(_stored_bytes(format, shape) for _, shape in experts.weights)
    return values + experts.layers * stored


def _stored_bytes(format: BlockScaledFormat, shape: WeightShape) -> int:
    """Return the bytes of a weight in plain tensors."""
    nbytes = 0
    for name in format.buffer_names:
        way: Direction = "columnwise" if name.startswith("columnwise") else "rowwise"
        if name == "global_amax":
            nbytes += 4 * shape[0]
        elif name.endswith("_data"):
            nbytes += prod(format.data_shape(shape, way))
        else:
            nbytes += prod(format.scale_shape(shape, way)) * format.scale_itemsize
    return nbytes
