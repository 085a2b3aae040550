"""Layout of buckets whose matrices each lie inside one rank's shard, from sizes alone.

Muon steps whole matrices, so a rank must own each of its matrices whole. Buckets are those of
:mod:`~moe_optim.buckets.matrix_packing`, one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moe_optim.buckets.layout import START
from moe_optim.buckets.matrix_packing import MatrixWeight as MatrixWeight
from moe_optim.buckets.matrix_packing import (
    PackedBucket,
    Shards,
    balance_bucket,
    owned_matrices,
    pack_chunks,
)
from moe_optim.errors import LayoutError


def iteration_cost(rows: int, cols: int) -> float:
    """Return the floating-point operations of one Newton-Schulz iteration.

    With m rows and n columns of the matrix or its transpose, m <= n: the Gram matrix takes m^2 n,
    its square m^3, both symmetric and multiplied by half, and the product with the matrix 2 m^2 n.
    """
    short, long = min(rows, cols), max(rows, cols)
    return float(3 * short * short * long + short**3)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLayout:
    """Places of weights in the buckets of a buffer."""

    weights: tuple[MatrixWeight, ...]
    dp_size: int
    places: tuple[tuple[int, int, int], ...]
    """Start and end within the buffer, and bucket, of each weight."""
    buckets: tuple[tuple[int, int], ...]
    """Start and end of each bucket."""
    numel_unpadded: tuple[int, ...]
    """End of the last weight within each bucket, Megatron's ``per_bucket_numel_unpadded``: what
    checkpoints hold of a bucket, gaps between its weights included."""

    @property
    def padding(self) -> float:
        """Padding of all buckets, as a part of the elements of their weights."""
        used = sum(weight.numel for weight in self.weights)
        return (self.buckets[-1][1] - used) / used if used else 0.0

    def owners(self, index: int) -> tuple[range, ...]:
        """Return the matrices of weight ``index`` that each rank owns."""
        start, _, bucket = self.places[index]
        bucket_start, bucket_end = self.buckets[bucket]
        shard_numel = (bucket_end - bucket_start) // self.dp_size
        return owned_matrices(self.weights[index], start - bucket_start, shard_numel, self.dp_size)

    def costs_by_rank(self) -> list[float]:
        """Return the cost of the matrices of each rank, over all buckets."""
        costs = [0.0] * self.dp_size
        for index, weight in enumerate(self.weights):
            for rank, owned in enumerate(self.owners(index)):
                costs[rank] += len(owned) * weight.cost
        return costs


def lay_out_matrices(
    weights: Sequence[MatrixWeight], *, dp_size: int, bucket_numel: int | None, unit: int = START
) -> MatrixLayout:
    """Return a layout in which every matrix lies inside one shard.

    A pure function of its arguments, so every rank computes the same layout.

    Args:
        weights: weights in the order of the backward pass, which is the order of their buckets.
        dp_size: number of shards of a bucket.
        bucket_numel: minimum number of elements of a bucket but the last; None for one bucket.
        unit: divisor of the length of a shard, a multiple of ``START``.

    Raises:
        LayoutError: shards of whole matrices would be longer than ``MOST_GROWTH`` least lengths.
    """
    if unit % START:
        raise LayoutError(
            f"matrix layout: expected a unit that is a multiple of {START} elements, got {unit}. "
            f"Pass lcm({START}, unit)."
        )
    costs = [0.0] * dp_size
    buckets: list[PackedBucket] = []
    for chunk, bucket in pack_chunks(weights, Shards(dp_size, unit), bucket_numel):
        placed = balance_bucket(chunk, bucket, costs)
        buckets.append(placed)
        costs = [sum(pair) for pair in zip(costs, placed.costs(chunk), strict=True)]
    ends = list(accumulate((bucket.numel for bucket in buckets), initial=0))
    starts = [
        (ends[number] + start, number)
        for number, bucket in enumerate(buckets)
        for start in bucket.starts
    ]
    unpadded = [0] * len(buckets)
    for (start, number), weight in zip(starts, weights, strict=True):
        unpadded[number] = max(unpadded[number], start + weight.numel - ends[number])
    return MatrixLayout(
        weights=tuple(weights),
        dp_size=dp_size,
        places=tuple(
            (start, start + weight.numel, number)
            for (start, number), weight in zip(starts, weights, strict=True)
        ),
        buckets=tuple(zip(ends[:-1], ends[1:], strict=True)),
        numel_unpadded=tuple(unpadded),
    )
