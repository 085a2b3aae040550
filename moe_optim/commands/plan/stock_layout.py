"""Layout of a buffer: offsets of parameters and ends of buckets, in stock Megatron and for Muon.

The former is that of ``DistributedOptimizer._compute_per_buffer_param_layout`` for parameters
without shared embeddings, computed from sizes without Megatron; tests compare the two.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

from moe_optim.buckets.layout import START, Slot
from moe_optim.buckets.matrix_layout import MatrixWeight, iteration_cost, lay_out_matrices
from moe_optim.formats import FORMATS, round_up

_END, _END_FOR_HIGH_BANDWIDTH = 128, 2**16
"""Divisors of bucket ends, the latter with ``--ddp-pad-buckets-for-high-nccl-busbw``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StockBucket:
    """Parameters of one bucket, and its end in stock Megatron in elements."""

    slots: tuple[Slot, ...]
    numel: int


def bucket_divisor(dp_size: int, *, high_busbw: bool) -> int:
    """Return the divisor of bucket ends for ``dp_size`` ranks."""
    return lcm(dp_size, _END, _END_FOR_HIGH_BANDWIDTH if high_busbw else 1)


def lay_buckets(
    params: Sequence[tuple[str, tuple[int, int, int]]], bucket_numel: int | None, divisor: int
) -> list[StockBucket]:
    """Return the buckets of a buffer, in the order of the backward pass.

    Args:
        params: name and [E, R, C] of each parameter, in model order.
        bucket_numel: minimum elements of a full bucket; None makes one bucket.
        divisor: divisor of bucket ends, see :func:`bucket_divisor`.
    """
    buckets: list[StockBucket] = []
    slots: list[Slot] = []
    for index, (name, shape) in enumerate(reversed(params), 1):
        start = round_up(slots[-1].end, START) if slots else 0
        slots.append(Slot(name=name, start=start, shape=shape))
        is_full = bucket_numel is not None and slots[-1].end >= bucket_numel
        if is_full or index == len(params):
            buckets.append(StockBucket(slots=tuple(slots), numel=round_up(slots[-1].end, divisor)))
            slots = []
    return buckets


def lay_matrices(
    params: Sequence[tuple[str, tuple[int, int, int]]],
    bucket_numel: int | None,
    dp_size: int,
    divisor: int,
) -> list[StockBucket]:
    """Return the buckets of Muon's matrices, of which each lies inside one shard.

    Weights of several matrices have one buffer per shape, others share one. Shards are whole blocks
    of every format. Arguments are those of :func:`lay_buckets`; LayoutError if no rank can own some
    matrix whole.
    """
    buffers = defaultdict(list)
    for name, shape in params[::-1]:
        buffers[shape[1:] if shape[0] > 1 else None].append((name, shape))
    return [
        bucket
        for buffer in buffers.values()
        for bucket in _lay_buffer(buffer, bucket_numel, dp_size, divisor)
    ]


def _lay_buffer(
    buffer: Sequence[tuple[str, tuple[int, int, int]]],
    bucket_numel: int | None,
    dp_size: int,
    divisor: int,
) -> list[StockBucket]:
    weights = [
        MatrixWeight(name=name, count=count, rows=rows, cols=cols, cost=iteration_cost(rows, cols))
        for name, (count, rows, cols) in buffer
    ]
    blocks = {
        prod(format.rowwise_block)
        for format in FORMATS.values()
        for _, (_, *dims) in buffer
        if not any(dim % block for dim, block in zip(dims, format.rowwise_block, strict=True))
    }
    unit = lcm(START, divisor // dp_size, *blocks)
    layout = lay_out_matrices(weights, dp_size=dp_size, bucket_numel=bucket_numel, unit=unit)
    slots = defaultdict(list)
    for (name, shape), (start, _, number) in zip(buffer, layout.places, strict=True):
        first = layout.buckets[number][0]
        slots[number].append(Slot(name=name, start=start - first, shape=shape))
    return [
        StockBucket(
            slots=tuple(sorted(slots[number], key=lambda slot: slot.start)), numel=end - start
        )
        for number, (start, end) in enumerate(layout.buckets)
    ]


def packed_nbytes(slots: Sequence[Slot], elements_per_byte: int, divisor: int) -> int:
    """Return the bytes of a bucket of packed elements, whose ends Megatron pads once more.

    ``_compute_nvfp4_packed_layout`` counts bytes where other layouts count elements.
    """
    end = 0
    for slot in slots:
        end = round_up(end, START) + slot.numel // elements_per_byte
    return round_up(end, divisor)
