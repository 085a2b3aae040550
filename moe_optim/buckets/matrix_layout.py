"""Layout of buckets whose matrices each lie inside one rank's shard, from sizes alone.

Muon steps whole matrices, so a rank must own each of its matrices whole. Buckets follow one
another; one of ``dp_size`` shards holds consecutive weights:

- Weights of several matrices [E, R, C] lie one after another, and every shard boundary inside of
  one falls between two of its matrices.
- Single matrices fill what remains of the shards: largest cost first, to the rank with the least
  cost that has room.

Weights join a bucket until its padding is within ``GROUPED_PADDING`` or ``SINGLE_PADDING`` of its
elements, plus one unit per shard. The last bucket takes what is left. Its shards, as all others,
are no longer than the mean and the largest of single matrices, or than ``ceil(matrices / dp_size)``
matrices of one shape that is a multiple of the unit. A single matrix that dominates its bucket, as
an embedding would, leaves the other shards empty; ``MatrixLayout.padding`` reports it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapify, heappop, heappush, merge
from itertools import accumulate
from math import lcm

from moe_optim.buckets.layout import START
from moe_optim.errors import LayoutError
from moe_optim.formats import round_up

GROUPED_PADDING = Fraction(1, 16)
"""Maximum padding of a bucket of weights of several matrices, as a part of its elements."""
SINGLE_PADDING = Fraction(1, 9)
"""Maximum padding of a bucket with single matrices: 0.9 of it is used, as in Megatron's layout."""
MOST_GROWTH = 3
"""Maximum length of a shard in least lengths, for shard boundaries between matrices."""
TOLERANCE = 1 / 32
"""Part of the highest cost of a rank by which it may grow to save padding."""
TRIES = 16
"""Shard lengths that are tried between the least and the longest."""


def iteration_cost(rows: int, cols: int) -> float:
    """Return the floating-point operations of one Newton-Schulz iteration.

    With m rows and n columns of the matrix or its transpose, m <= n: the Gram matrix takes m^2 n,
    its square m^3, both symmetric and multiplied by half, and the product with the matrix 2 m^2 n.
    """
    short, long = min(rows, cols), max(rows, cols)
    return float(3 * short * short * long + short**3)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixStack:
    """Parameter of one matrix [R, C], or of several of one shape [E, R, C]."""

    name: str
    count: int
    """Number of matrices E."""
    rows: int
    cols: int
    cost: float
    """Cost of orthogonalizing one of its matrices, in any unit."""

    @property
    def matrix_numel(self) -> int:
        """Number of elements of one matrix."""
        return self.rows * self.cols

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * self.matrix_numel


# Layouts


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLayout:
    """Places of weights in the buckets of a buffer."""

    weights: tuple[MatrixStack, ...]
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
    weights: Sequence[MatrixStack], *, dp_size: int, bucket_numel: int | None, unit: int = START
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


# Buckets


@dataclass(frozen=True, slots=True)
class Shards:
    """Number of shards of a bucket, and the divisor of their length."""

    count: int
    unit: int


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """Places of a chunk of weights in a bucket."""

    dp_size: int
    shard_numel: int
    starts: tuple[int, ...]
    """Start of each weight within the bucket."""

    @property
    def numel(self) -> int:
        """Length of the bucket."""
        return self.dp_size * self.shard_numel

    def costs(self, chunk: Sequence[MatrixStack]) -> list[float]:
        """Return the cost of each rank."""
        costs = [0.0] * self.dp_size
        for weight, start in zip(chunk, self.starts, strict=True):
            for rank, owned in enumerate(
                owned_matrices(weight, start, self.shard_numel, self.dp_size)
            ):
                costs[rank] += len(owned) * weight.cost
        return costs


def owned_matrices(
    weight: MatrixStack, start: int, shard_numel: int, dp_size: int
) -> tuple[range, ...]:
    """Return the matrices of each rank, for a weight that starts at ``start`` of its bucket."""
    cuts = [
        min(max(rank * shard_numel - start, 0), weight.numel) // weight.matrix_numel
        for rank in range(dp_size + 1)
    ]
    return tuple(range(first, end) for first, end in zip(cuts[:-1], cuts[1:], strict=True))


def pack_chunks(
    weights: Sequence[MatrixStack], shards: Shards, bucket_numel: int | None
) -> list[tuple[list[MatrixStack], PackedBucket]]:
    """Return consecutive weights and their buckets, each as short as its padding permits.

    What is left at the end joins the last bucket if it has more padding than others may have, and
    takes less memory there.
    """
    packed: list[tuple[list[MatrixStack], PackedBucket]] = []
    chunk: list[MatrixStack] = []
    numel = 0
    for weight in weights:
        chunk.append(weight)
        numel += weight.numel
        if bucket_numel is None or numel < bucket_numel:
            continue
        most = _most_numel(chunk, shards)
        if _least_shard(chunk, shards) * shards.count > most:
            continue
        bucket = _pack(chunk, shards)
        if bucket is not None and bucket.numel <= most:
            packed.append((chunk, bucket))
            chunk, numel = [], 0
    if not chunk:
        return packed
    alone = _pack(chunk, shards)
    if alone is None:
        raise _cannot_own_whole(chunk, shards)
    if packed and alone.numel > _most_numel(chunk, shards):
        joined = packed[-1][0] + chunk
        together = _pack(joined, shards)
        if together is not None and together.numel < packed[-1][1].numel + alone.numel:
            return [*packed[:-1], (joined, together)]
    return [*packed, (chunk, alone)]


def _most_numel(chunk: Sequence[MatrixStack], shards: Shards) -> int:
    """Return the maximum length of a bucket but the last."""
    numel = sum(weight.numel for weight in chunk)
    part = GROUPED_PADDING if all(weight.count > 1 for weight in chunk) else SINGLE_PADDING
    return int(numel * (1 + part)) + shards.count * shards.unit


def _pack(chunk: Sequence[MatrixStack], shards: Shards) -> PackedBucket | None:
    """Return the bucket of a chunk, None if its shards would be too long."""
    if all(weight.count == 1 for weight in chunk):
        return _pack_singles(chunk, shards)
    return _pack_grouped(chunk, shards)


def _least_shard(chunk: Sequence[MatrixStack], shards: Shards) -> int:
    """Return a lower bound of the length of a shard.

    It holds its part of the elements, and of n * dp_size + 1 matrices some rank owns n + 1.
    """
    total = sum(round_up(weight.numel, START) for weight in chunk)
    sizes: list[int] = []
    for weight in chunk:
        size = weight.matrix_numel
        sizes += [round_up(size, START)] if weight.count == 1 else [size] * weight.count
    sizes.sort(reverse=True)
    pigeonhole = max((n + 1) * size for n, size in enumerate(sizes[:: shards.count]))
    return round_up(max(-(-total // shards.count), pigeonhole), shards.unit)


def _cannot_own_whole(chunk: Sequence[MatrixStack], shards: Shards) -> LayoutError:
    grouped = [weight for weight in chunk if weight.count > 1]
    worst = max(grouped, key=lambda weight: lcm(shards.unit, weight.matrix_numel))
    return LayoutError(
        f"muon: {worst.name}: expected matrices that {shards.count} ranks can own whole, in shards "
        f"of multiples of {shards.unit} elements, got {worst.count} of [{worst.rows}, "
        f"{worst.cols}], matrices that no rank can own whole. Set expert_layout: indexed, which "
        "gives one parameter per expert."
    )


# Single matrices


def _pack_singles(chunk: Sequence[MatrixStack], shards: Shards) -> PackedBucket:
    """Return the bucket with the shortest tried shards on which costs balance.

    Costs balance if the highest cost of a rank is within ``TOLERANCE`` of that without a bound of
    the length, and ranks differ by one matrix at most. Where no length up to the mean plus the
    largest matrix allows that, memory goes first: the bucket has the lowest highest cost.
    """
    sizes = [round_up(weight.numel, START) for weight in chunk]
    empty = [(0.0, 0, rank) for rank in range(shards.count)]
    by_cost_alone = _fill(chunk, sum(sizes), empty)
    assert by_cost_alone is not None
    most = (1 + TOLERANCE) * max(_costs(chunk, by_cost_alone, shards))
    largest = max(weight.cost for weight in chunk)
    best: tuple[float, list[tuple[int, int]]] | None = None
    for shard_numel in _lengths(sizes, _least_shard(chunk, shards), shards):
        places = _fill(chunk, shard_numel, empty)
        if places is None:
            continue
        costs = _costs(chunk, places, shards)
        balances = max(costs) <= most and max(costs) - min(costs) <= largest
        if balances or best is None or max(costs) < best[0]:
            best = max(costs), places
        if balances:
            break
    assert best is not None  # the longest shard has room for every order
    ends = (offset + size for (_, offset), size in zip(best[1], sizes, strict=True))
    shard_numel = round_up(max(ends), shards.unit)
    starts = tuple(rank * shard_numel + offset for rank, offset in best[1])
    return PackedBucket(shards.count, shard_numel, starts)


def _lengths(sizes: Sequence[int], least: int, shards: Shards) -> Iterable[int]:
    """Return lengths of a shard from the least one to the mean plus the largest matrix."""
    longest = round_up(-(-sum(sizes) // shards.count) + max(sizes), shards.unit)
    step = round_up(-(-(longest - least) // TRIES) or 1, shards.unit)
    return [*range(least, longest, step), max(least, longest)]


def _costs(
    chunk: Sequence[MatrixStack], places: Sequence[tuple[int, int]], shards: Shards
) -> list[float]:
    costs = [0.0] * shards.count
    for weight, (rank, _) in zip(chunk, places, strict=True):
        costs[rank] += weight.cost
    return costs


def _fill(
    singles: Sequence[MatrixStack], shard_numel: int, filled: Iterable[tuple[float, int, int]]
) -> list[tuple[int, int]] | None:
    """Return the rank and the start within its shard of each matrix, None if there is no room.

    Args:
        singles: weights of one matrix.
        shard_numel: length of a shard.
        filled: cost, end of what lies in its shard, and number of each rank.
    """
    places = [(0, 0)] * len(singles)
    ranks = list(filled)
    heapify(ranks)
    order = sorted(
        range(len(singles)), key=lambda index: (-singles[index].cost, -singles[index].numel, index)
    )
    smallest = min((weight.numel for weight in singles), default=0)
    for index in order:
        weight, passed = singles[index], []
        while ranks and ranks[0][1] + weight.numel > shard_numel:
            full = heappop(ranks)
            if full[1] + smallest <= shard_numel:
                passed.append(full)
        if not ranks:
            return None
        cost, end, rank = heappop(ranks)
        places[index] = rank, end
        heappush(ranks, (cost + weight.cost, round_up(end + weight.numel, START), rank))
        for entry in passed:
            heappush(ranks, entry)
    return places


# Weights of several matrices


def _pack_grouped(chunk: Sequence[MatrixStack], shards: Shards) -> PackedBucket | None:
    """Return the bucket with the shortest shards of whole matrices, None if they are too long."""
    grouped = [index for index, weight in enumerate(chunk) if weight.count > 1]
    singles = [index for index, weight in enumerate(chunk) if weight.count == 1]
    weights = [chunk[index] for index in grouped]
    for shard_numel in _shards_of_whole(weights, _least_shard(chunk, shards), shards):
        line = _lay_side_by_side(weights, shard_numel, shards.count)
        if line is None:
            continue
        bucket = PackedBucket(shards.count, shard_numel, tuple(line))
        end = max(start + weight.numel for start, weight in zip(line, weights, strict=True))
        filled = [
            (cost, round_up(min(max(end - rank * shard_numel, 0), shard_numel), START), rank)
            for rank, cost in enumerate(bucket.costs(weights))
        ]
        places = _fill([chunk[index] for index in singles], shard_numel, filled)
        if places is None:
            continue
        starts = dict(zip(grouped, line, strict=True))
        for index, (rank, offset) in zip(singles, places, strict=True):
            starts[index] = rank * shard_numel + offset
        return PackedBucket(shards.count, shard_numel, tuple(starts[n] for n in range(len(chunk))))
    return None


def _shards_of_whole(grouped: Sequence[MatrixStack], least: int, shards: Shards) -> Iterator[int]:
    """Yield lengths of a shard that may hold whole matrices, ascending."""
    most = MOST_GROWTH * least
    # A weight longer than two shards has two boundaries inside.
    long = [weight.matrix_numel for weight in grouped if weight.numel > 2 * most]
    unit = lcm(shards.unit, *long)
    yield least  # weights that lie inside one shard need no boundary
    multiples = [
        (round_up(count * size, unit) for count in range(-(-least // size), most // size + 1))
        for size in sorted({weight.matrix_numel for weight in grouped})
    ]
    yield from (length for length in merge(*multiples) if length <= most)


def _lay_side_by_side(
    grouped: Sequence[MatrixStack], shard_numel: int, dp_size: int
) -> list[int] | None:
    """Return the starts of weights one after another, None if a matrix or the bucket is cut."""
    starts: list[int] = []
    end = 0
    for weight in grouped:
        start = _next_start(weight, round_up(end, START), shard_numel)
        if start is None:
            return None
        starts.append(start)
        end = start + weight.numel
    return starts if end <= dp_size * shard_numel else None


def _next_start(weight: MatrixStack, start: int, shard_numel: int) -> int | None:
    """Return the first start, from ``start`` on, with shard boundaries between matrices only."""
    boundary = round_up(start, shard_numel)
    if boundary > start and start + weight.numel <= boundary:
        return start
    step = lcm(START, weight.matrix_numel)
    start = boundary - (boundary - start) // step * step
    crosses_another = start + weight.numel > boundary + shard_numel
    return None if crosses_another and shard_numel % weight.matrix_numel else start


# Balance over buckets


def balance_bucket(
    chunk: Sequence[MatrixStack], bucket: PackedBucket, costs: Sequence[float]
) -> PackedBucket:
    """Return the bucket that balances best with the costs of the buckets before it.

    Of single matrices, the shard with the most cost goes to the rank with the least. So costs of
    ranks never differ by more than they differ in some bucket. Other buckets are mirrored if that
    lowers the highest cost of a rank.
    """
    if all(weight.count == 1 for weight in chunk):
        own = bucket.costs(chunk)
        shards = sorted(range(bucket.dp_size), key=lambda shard: (-own[shard], shard))
        ranks = sorted(range(bucket.dp_size), key=lambda rank: (costs[rank], rank))
        moves = {
            shard: (rank - shard) * bucket.shard_numel
            for shard, rank in zip(shards, ranks, strict=True)
        }
        return replace(
            bucket,
            starts=tuple(start + moves[start // bucket.shard_numel] for start in bucket.starts),
        )
    if any(weight.numel % START for weight in chunk):
        return bucket
    mirrored = replace(
        bucket,
        starts=tuple(
            bucket.numel - start - weight.numel
            for start, weight in zip(bucket.starts, chunk, strict=True)
        ),
    )
    return min(
        (bucket, mirrored),
        key=lambda one: max(map(sum, zip(costs, one.costs(chunk), strict=True))),
    )
