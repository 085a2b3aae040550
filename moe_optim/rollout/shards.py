"""How ranks of training and of an engine cut the stacked tensors of an expert linear.

A *stacked tensor* is data or scales of all experts of a linear, [E, R, B], with B bytes per row. A
rank holds some of the experts, whole or one part of each. Parts are even: of the rows of gate and
of up (``w13``), or of the bytes of every row (``w2``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from moe_optim.errors import ConfigError, LayoutError

Placement = Literal["contiguous", "round_robin"]
"""Distribution of experts over expert-parallel ranks."""
Shape = tuple[int, int, int]
"""Experts, rows, and bytes per row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Experts of one rank, and its part of each."""

    experts: tuple[int, ...]
    """Global numbers, in local order."""
    part: int = 0
    """Which part of each."""
    parts: int = 1
    """Parts of each expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive rows, or bytes of a row, of a shard."""

    start: int
    """Offset in the whole tensor, where gate rows precede up rows."""
    local: int
    """Offset in the shard."""
    length: int
    """Rows, or bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedTensor:
    """One tensor of all experts of a linear, and where it may be cut."""

    name: str
    """Name of the parameter in vLLM and SGLang, such as
    ``model.layers.3.mlp.experts.w13_weight``."""
    shape: Shape
    """Experts, rows, and bytes per row."""
    itemsize: int
    """Bytes per item; boxes hold whole items."""
    axis: int | None
    """Axis of one expert that parts cut, 0 or 1; None if every part has all of it."""
    runs: int = 1
    """Row blocks that are cut separately: 2 for gate and up."""
    block: int = 1
    """Rows, or bytes of a row, of one block of scales, along ``axis``."""
    interleave: int | None = None
    """Rows per alternating gate and up block in training; None: gate rows precede up rows."""

    def local_shape(self, shard: Shard) -> Shape:
        """Return experts, rows, and bytes per row on a rank.

        Args:
            shard: shard of the rank.
        """
        _, *sizes = self.shape
        if self.axis is not None:
            sizes[self.axis] //= shard.parts
        rows, columns = sizes
        return len(shard.experts), rows, columns

    def require_whole_blocks(self, parts: int, owner: str) -> None:
        """Raise LayoutError if parts, or gate and up, do not consist of whole blocks of scales.

        Args:
            parts: parts of each expert.
            owner: owner of the parts, for the error.
        """
        if self.axis is None or parts * self.runs == 1:
            return
        length = self.shape[1 + self.axis] // self.runs
        if length % (parts * self.block) == 0:
            return
        what = "bytes of each row" if self.axis else "rows of gate and of up"
        raise LayoutError(
            f"plan_transfers: {self.name}: expected {what} of {owner} in {parts} even parts of "
            f"whole blocks of {self.block}, got {length}, {length / parts:g} for each part. Use a "
            f"tensor-parallel size that divides {length // self.block}, or expert parallelism."
        )

    def segments(self, shard: Shard, *, in_training: bool) -> Iterator[Segment]:
        """Yield the segments of ``shard`` along ``axis``; all rows if it is None.

        ``in_training``: whether gate and up rows may interleave.
        """
        length = self.shape[1 + (self.axis or 0)]
        if self.axis is None:
            yield Segment(start=0, local=0, length=length)
        elif in_training and self.interleave is not None:
            yield from self._interleaved(shard, self.interleave)
        elif shard.parts == 1:
            yield Segment(start=0, local=0, length=length)
        else:
            run = length // self.runs
            piece = run // shard.parts
            for number in range(self.runs):
                start = number * run + shard.part * piece
                yield Segment(start=start, local=number * piece, length=piece)

    def _interleaved(self, shard: Shard, rows: int) -> Iterator[Segment]:
        length = self.shape[1] // shard.parts
        for local in range(0, length, rows):
            pair, is_up = divmod((shard.part * length + local) // rows, 2)
            start = pair * rows + is_up * self.shape[1] // 2
            yield Segment(start=start, local=local, length=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLayout:
    """Parallel layout of an engine's experts, as vLLM and SGLang number their ranks.

    Rank ``(replica * expert_parallel_size + e) * tensor_parallel_size + t`` holds part ``t`` of the
    experts of expert-parallel rank ``e``. vLLM with expert parallelism has whole experts: tensor
    size 1, and the product of its tensor and data sizes as expert size. SGLang divides its tensor
    size by its expert size.
    """

    expert_parallel_size: int = 1
    """Ranks that experts are distributed over."""
    tensor_parallel_size: int = 1
    """Ranks that share an expert: rows of gate and of up, columns of down."""
    placement: Placement = "contiguous"
    """``contiguous``, where the first ranks hold one expert more if they cannot be spread evenly;
    or ``round_robin``."""
    replicas: int = 1
    """Engines with the same layout, or data-parallel ranks with the same experts."""

    def __post_init__(self) -> None:
        """Check sizes and placement.

        Raises:
            ConfigError: a size is below 1, or the placement is unknown.
        """
        sizes = ("expert_parallel_size", "tensor_parallel_size", "replicas")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"EngineLayout.{name}: expected at least 1, got {getattr(self, name)}. Name "
                    "the size that the engine was started with."
                )
        if self.placement not in get_args(Placement):
            raise ConfigError(
                f"EngineLayout.placement: expected one of {', '.join(get_args(Placement))}, got "
                f"{self.placement!r}. Name the placement that the engine was started with."
            )

    @property
    def size(self) -> int:
        """Number of engine ranks."""
        return self.replicas * self.expert_parallel_size * self.tensor_parallel_size

    def shard(self, rank: int, experts: int) -> Shard:
        """Return what engine rank ``rank`` holds of a layer with ``experts`` experts.

        Raises:
            ConfigError: fewer experts than expert-parallel ranks.
        """
        ranks = self.expert_parallel_size
        if experts < ranks:
            raise ConfigError(
                f"EngineLayout.expert_parallel_size: expected at most {experts}, the experts of a "
                f"layer, got {ranks}. Use fewer expert-parallel ranks."
            )
        number, part = divmod(rank, self.tensor_parallel_size)
        number %= ranks
        if self.placement == "round_robin":
            own = range(number, experts, ranks)
        else:
            count, left = divmod(experts, ranks)
            first = number * count + min(number, left)
            own = range(first, first + count + (number < left))
        return Shard(experts=tuple(own), part=part, parts=self.tensor_parallel_size)
