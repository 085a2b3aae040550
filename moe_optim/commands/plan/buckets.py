"""Buckets of expert weights, ours and stock Megatron's, and what each shard of them holds.

Computed from sizes, without Megatron and numpy, whose import takes longer than most plans.
"""

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple

from moe_optim.buckets.layout import START, Slot, aligned_end
from moe_optim.buckets.matrix_layout import MatrixStack, iteration_cost, lay_out_matrices
from moe_optim.formats import BlockScaledFormat, round_up

Counts = list[int]
"""[dp_size]: a number for each rank."""
Params = Sequence[tuple[str, tuple[int, int, int]]]
"""Name and [E, R, C] of each parameter, in model order."""

_END, _END_FOR_HIGH_BANDWIDTH = 128, 2**16
"""Divisors of bucket ends, the latter with ``--ddp-pad-buckets-for-high-nccl-busbw``."""
_FLOOR = 0.9
"""Least part of a bucket that its weights fill, unless it is the last; ``PADDING_FLOOR``."""


class Shards(NamedTuple):
    """How the buckets of a buffer are cut."""

    bucket_numel: int | None
    """Minimum elements of a full bucket; None for one bucket."""
    dp_size: int
    """Number of ranks that own equal shards of a bucket."""
    divisor: int
    """Divisor of bucket ends."""


class Bucket(NamedTuple):
    """Parameters of one bucket. Hashable, as a model has many equal ones."""

    slots: tuple[Slot, ...]
    numel: int
    """End in elements: stock Megatron's, or that of matrices that Muon steps."""
    shards: Shards
    holds_matrices: bool = False
    """Whether every matrix lies inside one shard."""

    def aligned_numel(self, format: BlockScaledFormat) -> int:
        """Return the end of the bucket, of Adam's weights with ``layout: aligned``."""
        if self.holds_matrices:
            return self.numel
        shards = self.shards
        end = aligned_end(format, self.slots, dp_size=shards.dp_size, divisor=shards.divisor)
        return end.numel


def bucket_divisor(dp_size: int, *, high_busbw: bool) -> int:
    """Return the divisor of bucket ends for ``dp_size`` ranks."""
    return lcm(dp_size, _END, _END_FOR_HIGH_BANDWIDTH if high_busbw else 1)


def lay_buckets(params: Params, shards: Shards) -> Iterator[Bucket]:
    """Yield stock Megatron's buckets of a buffer, in the order of the backward pass.

    Equal to ``DistributedOptimizer._compute_per_buffer_param_layout`` for parameters without shared
    embeddings.
    """
    slots: list[Slot] = []
    for index, (name, shape) in enumerate(reversed(params), 1):
        start = round_up(slots[-1].end, START) if slots else 0
        slots.append(Slot(name=name, start=start, shape=shape))
        is_full = shards.bucket_numel is not None and slots[-1].end >= shards.bucket_numel
        if is_full or index == len(params):
            numel = round_up(slots[-1].end, shards.divisor)
            yield Bucket(slots=tuple(slots), numel=numel, shards=shards)
            slots = []


def lay_matrix_buckets(
    params: Params, shards: Shards, *, format: BlockScaledFormat
) -> Iterator[Bucket]:
    """Yield our buckets of weights that Muon steps, a matrix inside one shard each.

    Weights of several matrices have a buffer for each of their shapes. LayoutError if no rank can
    own some matrix whole.
    """
    buffers: dict[tuple[int, ...], list[MatrixStack]] = {}
    for name, (count, rows, cols) in reversed(params):
        cost = iteration_cost(rows, cols)
        weight = MatrixStack(name=name, count=count, rows=rows, cols=cols, cost=cost)
        buffers.setdefault((rows, cols) if count > 1 else (), []).append(weight)
    row, col = format.rowwise_block
    for weights in buffers.values():
        has_whole_blocks = any(one.rows % row == one.cols % col == 0 for one in weights)
        block = prod(format.rowwise_block) if has_whole_blocks else 1
        layout = lay_out_matrices(
            weights,
            dp_size=shards.dp_size,
            bucket_numel=shards.bucket_numel,
            unit=lcm(START, block, shards.divisor // shards.dp_size),
        )
        slots: list[list[Slot]] = [[] for _ in layout.buckets]
        for weight, (start, _, bucket) in zip(weights, layout.places, strict=True):
            shape = (weight.count, weight.rows, weight.cols)
            start -= layout.buckets[bucket][0]
            slots[bucket].append(Slot(name=weight.name, start=start, shape=shape))
        for (start, end), within in zip(layout.buckets, slots, strict=True):
            yield _bucket_of_matrices(within, end - start, shards)


def lay_layer_wise_buckets(params: Params, shards: Shards) -> Iterator[Bucket]:
    """Yield the buckets of Megatron's layer-wise optimizer, for a parameter per matrix.

    Equal to ``LayerWiseDistributedOptimizer._compute_per_buffer_param_layout`` without shared
    embeddings: a bucket takes parameters in the order of the backward pass until they fill it, and
    gives each, largest first, to the shard with least elements.
    """
    chunk: list[tuple[str, int, int]] = []
    numel = most = 0
    for name, (count, rows, cols) in reversed(params):
        for _ in range(count):
            chunk.append((name, rows, cols))
            numel, most = numel + rows * cols, max(most, rows * cols)
            least = int(shards.dp_size * most * _FLOOR)
            if shards.bucket_numel is not None and numel >= max(shards.bucket_numel, least):
                yield _fill_shards(chunk, shards)
                chunk, numel, most = [], 0, 0
    if chunk:
        yield _fill_shards(chunk, shards)


def _fill_shards(chunk: Sequence[tuple[str, int, int]], shards: Shards) -> Bucket:
    ends = [0] * shards.dp_size
    placed: list[tuple[int, Slot]] = []
    for name, rows, cols in sorted(chunk, key=lambda one: -prod(one[1:])):
        shard = min(range(shards.dp_size), key=ends.__getitem__)
        slot = Slot(name=name, start=round_up(ends[shard], START), shape=(1, rows, cols))
        placed.append((shard, slot))
        ends[shard] = slot.end
    numel = round_up(max(ends), lcm(START, shards.divisor // shards.dp_size))
    slots = [
        Slot(name=slot.name, start=shard * numel + slot.start, shape=slot.shape)
        for shard, slot in placed
    ]
    return _bucket_of_matrices(slots, shards.dp_size * numel, shards)


def _bucket_of_matrices(slots: Sequence[Slot], numel: int, shards: Shards) -> Bucket:
    ordered = tuple(sorted(slots, key=lambda slot: slot.start))
    return Bucket(slots=ordered, numel=numel, shards=shards, holds_matrices=True)


def packed_nbytes(slots: Sequence[Slot], elements_per_byte: int, divisor: int) -> int:
    """Return the bytes of a bucket of packed elements, whose ends Megatron pads once more.

    ``_compute_nvfp4_packed_layout`` counts bytes where other layouts count elements.
    """
    end = 0
    for slot in slots:
        end = round_up(end, START) + slot.numel // elements_per_byte
    return round_up(end, divisor)


def count_owned(slots: Sequence[Slot], bucket_numel: int, dp_size: int) -> Counts:
    """Return the number of parameter elements in the shard of each rank.

    Shards are equal parts of the bucket; gaps between ``slots``, which are in order, are padding.
    """
    shard = bucket_numel // dp_size
    owned = [0] * dp_size
    for slot in slots:
        first, last = slot.start // shard, (slot.end - 1) // shard
        if first == last:
            owned[first] += slot.numel
            continue
        owned[first] += (first + 1) * shard - slot.start
        owned[first + 1 : last] = [shard] * (last - first - 1)
        owned[last] += slot.end - last * shard
    return owned
