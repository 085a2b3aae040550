"""Which elements of which members a data-parallel rank owns. Pure integers: no device, no group."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat, Direction, get_format


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One expert's weight [rows, cols], row-major in a bucket."""

    parameter: str
    """Name of the parameter that holds it, as the model names it."""
    layer: int
    """Global number of the transformer layer."""
    expert: int
    """Global number of the expert within its layer."""
    rows: int
    cols: int
    format: str
    """Name of a block-scaled format, or ``bf16``."""
    bucket: int
    """Number of the bucket within its buffer."""
    start: int
    """First element within the bucket."""

    def __post_init__(self) -> None:
        """Check that the format exists and can hold the shape.

        Raises:
            ConfigError: no such format.
            LayoutError: an empty shape, one the format cannot hold, or a negative start.
        """
        if self.rows < 1 or self.cols < 1 or self.start < 0:
            raise LayoutError(
                f"{self}: expected at least one row and one column and a start from 0 on, got "
                f"[{self.rows}, {self.cols}] at {self.start}."
            )
        if self.descriptor is not None:
            self.descriptor.check_shape((1, self.rows, self.cols), str(self))

    def __str__(self) -> str:
        return f"{self.parameter} (layer {self.layer}, expert {self.expert})"

    @property
    def descriptor(self) -> BlockScaledFormat | None:
        """The descriptor of the format, None for ``bf16``."""
        return None if self.format == "bf16" else get_format(self.format)

    @property
    def numel(self) -> int:
        """Logical elements of the weight."""
        return self.rows * self.cols

    @property
    def end(self) -> int:
        """One past the last element within the bucket."""
        return self.start + self.numel

    def cuts_block(self, start: int, end: int, direction: Direction) -> bool:
        """Return whether some block has elements inside and outside of a range of the member.

        Such a block needs the amax of other ranks. Empty ranges cut nothing, bf16 has no blocks.

        Args:
            start: first element, counted in the member.
            end: one past the last element.
            direction: whose blocks.
        """
        if self.descriptor is None or start >= end:
            return False
        rows, cols = self.descriptor.block(direction)
        return not (self._is_block_edge(start, rows, cols) and self._is_block_edge(end, rows, cols))

    def _is_block_edge(self, position: int, block_rows: int, block_cols: int) -> bool:
        """Return whether no block has elements on both sides of ``position``.

        A range that begins and ends at such edges is a union of blocks, and the other way round:
        row-major order passes through all blocks of a block row at once, unless they are one high.
        """
        row, col = divmod(position, self.cols)
        if row == self.rows or (row % block_rows == 0 and col == 0):
            return True
        height = min(block_rows, self.rows - row // block_rows * block_rows)
        return height == 1 and col % block_cols == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRange:
    """The elements of one member that one rank owns."""

    member: Member
    start: int
    """First element, counted in the member."""
    end: int
    """One past the last element, counted in the member."""
    shard_start: int
    """Where the range begins in the rank's shard, in elements."""
    cuts_rowwise: bool
    """Whether a rowwise block lies only partly in the range."""
    cuts_columnwise: bool
    """Whether a columnwise block lies only partly in the range."""

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.end - self.start

    @property
    def shard_end(self) -> int:
        """Where the range ends in the rank's shard, in elements."""
        return self.shard_start + self.numel

    @property
    def cuts_block(self) -> bool:
        """Whether a block of either direction lies only partly in the range."""
        return self.cuts_rowwise or self.cuts_columnwise


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """What one rank owns of one bucket. Every rank can plan every other, without communication."""

    dp_rank: int
    dp_size: int
    bucket_numel: int
    """Elements of the bucket, padding included."""
    ranges: tuple[MemberRange, ...]
    """In the order of the bucket, none of them empty. What they leave out is padding."""

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's shard."""
        return self.bucket_numel // self.dp_size

    @property
    def start(self) -> int:
        """First element of the shard within the bucket."""
        return self.dp_rank * self.shard_numel

    @property
    def end(self) -> int:
        """One past the last element of the shard within the bucket."""
        return self.start + self.shard_numel

    @property
    def cuts_block(self) -> bool:
        """Whether any range cuts a block, so that an amax must be exchanged."""
        return any(owned.cuts_block for owned in self.ranges)


def plan_shards(
    members: Sequence[Member], bucket_numel: int, dp_rank: int, dp_size: int
) -> ShardPlan:
    """Return what ``dp_rank`` owns of a bucket cut into ``dp_size`` equal shards.

    Args:
        members: all of one bucket, in any order; gaps between them are padding.
        bucket_numel: elements of the bucket, padding included.
        dp_rank: whose shard.
        dp_size: ranks that share the bucket.

    Raises:
        LayoutError: the bucket does not divide, or members overlap, leave the bucket or belong to
            different buckets.
    """
    if dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise LayoutError(f"plan_shards: expected a rank below {dp_size}, got rank {dp_rank}.")
    ordered = _check_members(members, bucket_numel)
    if bucket_numel % dp_size:
        raise LayoutError(
            f"bucket {ordered[0].bucket if ordered else '(empty)'}: expected a number of elements "
            f"divisible by {dp_size} ranks, got {bucket_numel}. Pad the end of the bucket."
        )
    shard_numel = bucket_numel // dp_size
    shard_start = dp_rank * shard_numel
    ranges = (_owned_range(member, shard_start, shard_start + shard_numel) for member in ordered)
    return ShardPlan(
        dp_rank=dp_rank,
        dp_size=dp_size,
        bucket_numel=bucket_numel,
        ranges=tuple(owned for owned in ranges if owned.numel > 0),
    )


def _owned_range(member: Member, shard_start: int, shard_end: int) -> MemberRange:
    """Intersect a member with a shard, both given within the bucket; may come out empty."""
    start = max(member.start, shard_start)
    end = max(start, min(member.end, shard_end))
    in_member = (start - member.start, end - member.start)
    return MemberRange(
        member=member,
        start=in_member[0],
        end=in_member[1],
        shard_start=start - shard_start,
        cuts_rowwise=member.cuts_block(*in_member, "rowwise"),
        cuts_columnwise=member.cuts_block(*in_member, "columnwise"),
    )


def _check_members(members: Sequence[Member], bucket_numel: int) -> list[Member]:
    """Return ``members`` in bucket order after checking that they fit side by side."""
    ordered = sorted(members, key=lambda member: member.start)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.bucket != after.bucket:
            raise LayoutError(
                f"{after}: expected members of bucket {before.bucket}, got bucket {after.bucket}. "
                f"Plan each bucket by itself."
            )
        if before.end > after.start:
            raise LayoutError(
                f"{after}: expected a start from {before.end} on, where {before} ends, got "
                f"{after.start}. Members of a bucket must not overlap."
            )
    if ordered and ordered[-1].end > bucket_numel:
        raise LayoutError(
            f"{ordered[-1]}: expected an end within the {bucket_numel} elements of bucket "
            f"{ordered[-1].bucket}, got {ordered[-1].end}. Enlarge the bucket."
        )
    return ordered
