"""Stock Megatron's layout of a buffer: offsets of parameters and ends of buckets.

Equal to ``DistributedOptimizer._compute_per_buffer_param_layout`` for parameters without shared
embeddings, computed from sizes without Megatron; tests compare the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from moe_optim.buckets.layout import START, Slot
from moe_optim.formats import round_up

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


def packed_nbytes(slots: Sequence[Slot], elements_per_byte: int, divisor: int) -> int:
    """Return the bytes of a bucket of packed elements, whose ends Megatron pads once more.

    ``_compute_nvfp4_packed_layout`` counts bytes where other layouts count elements.
    """
    end = 0
    for slot in slots:
        end = round_up(end, START) + slot.numel // elements_per_byte
    return round_up(end, divisor)
