"""Costs of expert weights per rank, counted on the layouts that a run would use.

All counts are exact and follow from shapes: buffers from ``plan_buffers``, buckets from Megatron's
layout, exchanged maxima from ``plan_exchange``. Excluded are kernel tables (addresses, tiles,
slots), allocator rounding, and temporary allocations of Megatron's own casts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

from moe_optim.buckets.layout import Slot, plan_buffers
from moe_optim.commands.plan.buckets import Bucket, Counts, count_owned, packed_nbytes
from moe_optim.commands.plan.experts import PlannedExperts, WeightShape
from moe_optim.errors import LayoutError
from moe_optim.formats import DIRECTIONS, FORMATS, BlockScaledFormat, Direction
from moe_optim.kernels.exchange import plan_exchange

MASTER, BF16 = 4, 2  # bytes
STOCK_BF16, STOCK_MXFP8, STOCK_NVFP4, STOCK_FP8_BLOCK = STOCKS = (
    "stock bf16",
    "stock mxfp8",
    "stock nvfp4",
    "stock fp8_block",
)
"""Stock Megatron: bf16 weights in a parameter buffer, trained without FP8; MXFP8 weights gathered
in bf16 through the gradient memory; FP8 blocks and NVFP4 with rowwise data in a parameter buffer.
"""
ROWS = (*FORMATS, *STOCKS)
"""Formats of the rows of a plan, for each number of GPUs, unless weights do not fit them."""
MUON_ROWS = (*FORMATS, STOCK_BF16)
"""The same with Muon. Stock's layer-wise optimizer gathers bf16, whatever the weights are kept in.
"""

BUFFERS = tuple(f"{way}_{kind}" for way in DIRECTIONS for kind in ("data", "scale"))
WEIGHTS = (
    *(*BUFFERS, "global_amax", "storage_scales"),
    *("parameter_buffer", "exchange", "compute_copies"),
)
OPTIMIZER = ("masters", "moments")
PARTS = (*WEIGHTS, "gradients", *OPTIMIZER, "gradient_copies")
"""Components of a rank's bytes. The first five are fields of ``QuantizedWeight``; storage scales
are the padded, replicated ones that Transformer Engine's GEMMs read; the parameter buffer is
Megatron's; the exchange holds the maxima that ranks reduce; compute copies are those of
:func:`copy_bytes`; gradient copies are made by a step.
"""


class Costs(NamedTuple):
    """Costs of one bucket, or of all buckets of a rank."""

    sums: Mapping[str, int]
    """Component of :data:`PARTS` -> bytes, but masters and moments, which follow from
    :attr:`owned`; ``gathered``: bytes of the gather on each rank, including its own shard;
    ``numel`` and ``used``: elements, with and without padding."""
    owned: Counts
    """Weight elements whose masters each rank owns."""


def left_out(experts: PlannedExperts) -> dict[str, str]:
    """Return the formats that these weights cannot be stored in, each with the reason."""
    reasons: dict[str, str] = {}
    for name, format in FORMATS.items():
        if experts.in_te and format.is_row_only:
            reasons[name] = "Transformer Engine's tensors have columnwise data"
        for weight, shape in experts.weights:
            try:
                format.check_shape(shape, weight)
            except LayoutError as error:
                reasons.setdefault(name, str(error).partition(". ")[0])
    return reasons


def step_bytes(
    format: BlockScaledFormat, numel: int, *, grad_bytes: int, moment_bytes: int
) -> Fraction:
    """Return the minimum bytes that a fused Adam step, including encoding, reads and writes.

    The step reads gradients, reads and writes masters and both moments (``moment_bytes`` together),
    and writes gathered buffers. It reads masters twice if the codes depend on an amax of the
    expert.
    """
    masters = MASTER * (3 if format.has_global_amax else 2)
    return numel * (grad_bytes + masters + 2 * moment_bytes + format.gathered_bytes_per_element)


def count_costs(name: str, experts: PlannedExperts, buckets: Counter[Bucket]) -> Costs:
    """Return the costs of all buckets of a rank, each with its number, in the row ``name``."""
    sums: Counter[str] = Counter()
    owned = []
    for bucket, number in buckets.items():
        if name in FORMATS:
            costs = _quantized_costs(FORMATS[name], bucket, experts)
        else:
            stock = FORMATS.get(name.removeprefix("stock "))
            costs = _stock_costs(stock, bucket, experts.grad_bytes)
        used = sum(slot.numel for slot in bucket.slots)
        for what, count in {**costs.sums, "used": used}.items():
            sums[what] += count * number
        owned.append([count * number for count in costs.owned])
    return Costs(sums, [sum(counts) for counts in zip(*owned, strict=True)])


def _quantized_costs(format: BlockScaledFormat, bucket: Bucket, experts: PlannedExperts) -> Costs:
    """Count ``wire: quantized`` with ``layout: aligned``."""
    slots, dp_size = bucket.slots, bucket.shards.dp_size
    numel = bucket.aligned_numel(format)
    gathered = {one.name: one.nbytes for one in plan_buffers(format, slots, numel, dp_size)}
    parts = dict(gathered)
    if format.columnwise_copy == "transposed":
        parts["columnwise_data"] = _data_bytes(format, slots)
    if experts.in_te:  # padded scales besides the buffers
        parts["storage_scales"] = sum(_storage_scale_bytes(format, slots).values())
    elif format.is_2d:
        scales = sum(prod(format.scale_shape(slot.shape, "columnwise")) for slot in slots)
        parts["columnwise_scale"] = scales * format.scale_itemsize
    maxima = sum(
        plan_exchange(format, slot.shape, slot.cuts(numel // dp_size), name=slot.name).size
        for slot in slots
    )
    sums = {
        **parts,
        "exchange": 4 * maxima,
        "gradients": numel * experts.grad_bytes,
        "gathered": sum(gathered.values()),
        "numel": numel,
    }
    return Costs(sums, count_owned(slots, numel, dp_size))


def _stock_costs(format: BlockScaledFormat | None, bucket: Bucket, grad_bytes: int) -> Costs:
    """Count stock Megatron's distributed optimizer; bf16 if ``format`` is None.

    Quantized weights are Transformer Engine tensors with padded scales. MXFP8 is quantized after
    the gather, each expert separately; the gather reuses the gradient memory
    (``--reuse-grad-buf-for-mxfp8-param-ag``). Other formats are quantized before the gather, with
    the rowwise data as the parameter buffer.
    """
    slots, numel, dp_size = bucket.slots, bucket.numel, bucket.shards.dp_size
    experts = sum(slot.shape[0] for slot in slots)
    gathered, parts = BF16 * numel, {"parameter_buffer": BF16 * numel}
    if format is not None:
        parts = _storage_scale_bytes(format, slots)
        parts["columnwise_data"] = _data_bytes(format, slots)
        if format.columnwise_copy == "quantized":
            parts["rowwise_data"] = _data_bytes(format, slots)
        else:
            gathered = packed_nbytes(slots, format.elements_per_byte, bucket.shards.divisor)
            parts["parameter_buffer"] = gathered
            parts["global_amax"] = 2 * 4 * experts * format.has_global_amax
    sums = {**parts, "gradients": numel * grad_bytes, "gathered": gathered, "numel": numel}
    return Costs(sums, count_owned(slots, numel, dp_size))


def _data_bytes(format: BlockScaledFormat, slots: Sequence[Slot]) -> int:
    return sum(prod(format.data_shape(slot.shape, "rowwise")) for slot in slots)


def _storage_scale_bytes(format: BlockScaledFormat, slots: Sequence[Slot]) -> dict[str, int]:
    shapes = Counter(slot.shape for slot in slots)
    return {
        f"{way}_scale": sum(
            count * experts * prod(format.storage_scale_shape(rows, cols, way))
            for (experts, rows, cols), count in shapes.items()
        )
        * format.scale_itemsize
        for way in DIRECTIONS
    }


def copy_bytes(experts: PlannedExperts, compute: str) -> int:
    """Return the bytes of all copies of bf16 experts that ``compute`` makes for their GEMMs.

    Transformer Engine's experts keep bf16 values of every layer while a step runs; portable ones
    dequantize one linear at a time. Block-scaled formats are quantized into bytes of their own,
    which stay, unless they are row-only and of Transformer Engine's experts.
    """
    format = FORMATS.get(compute)
    numels = [prod(shape) for _, shape in experts.weights]
    values = BF16 * (max(numels) if experts.is_portable else experts.layers * sum(numels))
    if format is None or (format.is_row_only and not experts.is_portable):
        return values
    stored = sum(_stored_bytes(format, shape) for _, shape in experts.weights)
    return values + experts.layers * stored


def _stored_bytes(format: BlockScaledFormat, shape: WeightShape) -> int:
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
