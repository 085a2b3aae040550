"""Buckets of matrices that Muon steps, ours and stock Megatron's, computed from sizes."""

from collections.abc import Iterator, Sequence
from math import lcm, prod

from moe_optim.buckets.layout import START, Slot
from moe_optim.buckets.matrix_layout import MatrixWeight, iteration_cost, lay_out_matrices
from moe_optim.commands.plan.stock_layout import StockBucket
from moe_optim.formats import BlockScaledFormat, round_up

_FLOOR = 0.9
"""Least part of a bucket that its weights fill, unless it is the last; ``PADDING_FLOOR``."""

Params = Sequence[tuple[str, tuple[int, int, int]]]
"""Name and [E, R, C] of each parameter, in model order."""


def lay_matrix_buckets(
    params: Params,
    format: BlockScaledFormat,
    *,
    dp_size: int,
    bucket_numel: int | None,
    divisor: int,
) -> list[StockBucket]:
    """Return our buckets, in which every matrix lies inside one shard.

    Weights of several matrices have a buffer for each of their shapes, as in
    :mod:`moe_optim.buckets.matrix_buffers`.

    Args:
        params: weights of experts of one model chunk.
        format: format of the weights.
        dp_size: number of ranks that own equal shards of a bucket.
        bucket_numel: minimum elements of a full bucket; None makes one bucket.
        divisor: divisor of bucket ends.

    Raises:
        LayoutError: no rank can own some matrix whole.
    """
    buffers: dict[tuple[int, ...], list[MatrixWeight]] = {}
    for name, (count, rows, cols) in reversed(params):
        cost = iteration_cost(rows, cols)
        weight = MatrixWeight(name=name, count=count, rows=rows, cols=cols, cost=cost)
        buffers.setdefault((rows, cols) if count > 1 else (), []).append(weight)
    return [
        bucket
        for weights in buffers.values()
        for bucket in _lay_buffer(weights, format, dp_size, bucket_numel, divisor)
    ]


def _lay_buffer(
    weights: Sequence[MatrixWeight],
    format: BlockScaledFormat,
    dp_size: int,
    bucket_numel: int | None,
    divisor: int,
) -> Iterator[StockBucket]:
    row, col = format.rowwise_block
    has_whole_blocks = any(one.rows % row == one.cols % col == 0 for one in weights)
    block = prod(format.rowwise_block) if has_whole_blocks else 1
    layout = lay_out_matrices(
        weights,
        dp_size=dp_size,
        bucket_numel=bucket_numel,
        unit=lcm(START, block, divisor // dp_size),
    )
    slots: list[list[Slot]] = [[] for _ in layout.buckets]
    for weight, (start, _, bucket) in zip(weights, layout.places, strict=True):
        shape = (weight.count, weight.rows, weight.cols)
        start -= layout.buckets[bucket][0]
        slots[bucket].append(Slot(name=weight.name, start=start, shape=shape))
    for (start, end), within in zip(layout.buckets, slots, strict=True):
        within.sort(key=lambda slot: slot.start)
        yield StockBucket(slots=tuple(within), numel=end - start)


def lay_layer_wise_buckets(
    params: Params, *, dp_size: int, bucket_numel: int | None, divisor: int
) -> list[StockBucket]:
    """Return the buckets of Megatron's layer-wise optimizer, for a parameter per matrix.

    Equal to ``LayerWiseDistributedOptimizer._compute_per_buffer_param_layout`` without shared
    embeddings: a bucket takes parameters in the order of the backward pass until they fill it, and
    gives each, largest first, to the shard with least elements. Arguments as above.
    """
    unit = lcm(START, divisor // dp_size)
    buckets: list[StockBucket] = []
    chunk: list[tuple[str, int, int]] = []
    numel = most = 0
    matrices = [
        (name, rows, cols) for name, (count, rows, cols) in reversed(params) for _ in range(count)
    ]
    for matrix in matrices:
        chunk.append(matrix)
        numel, most = numel + prod(matrix[1:]), max(most, prod(matrix[1:]))
        if bucket_numel is not None and numel >= max(bucket_numel, int(dp_size * most * _FLOOR)):
            buckets.append(_fill_shards(chunk, dp_size, unit))
            chunk, numel, most = [], 0, 0
    return [*buckets, _fill_shards(chunk, dp_size, unit)] if chunk else buckets


def _fill_shards(chunk: Sequence[tuple[str, int, int]], dp_size: int, unit: int) -> StockBucket:
    ends = [0] * dp_size
    placed: list[tuple[int, int, tuple[str, int, int]]] = []
    for matrix in sorted(chunk, key=lambda one: -prod(one[1:])):
        shard = min(range(dp_size), key=ends.__getitem__)
        start = round_up(ends[shard], START)
        placed.append((shard, start, matrix))
        ends[shard] = start + prod(matrix[1:])
    shard_numel = round_up(max(ends), unit)
    slots = (
        Slot(name=name, start=shard * shard_numel + start, shape=(1, rows, cols))
        for shard, start, (name, rows, cols) in placed
    )
    return StockBucket(
        slots=tuple(sorted(slots, key=lambda slot: slot.start)), numel=dp_size * shard_numel
    )
