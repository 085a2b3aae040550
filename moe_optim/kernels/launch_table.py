"""Device descriptors of one launch: pointers, shapes and strides of its members, and its tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import DIRECTIONS, MXFP8, QuantizedWeight
from moe_optim.kernels.tuning import BLOCK, REQUANTIZE_MXFP8, Tile

DESCRIPTOR_FIELDS = 11
"""Columns of :attr:`LaunchTable.descriptors`."""
GAP_TILE = 4096
"""Two-byte units that one program zeroes outside the members."""

_ALIGNMENT = 16  # bytes of the widest memory access
_MAX_GAP = 1 << 30  # units a descriptor; a tile keeps its first one in an int32

Range = tuple[int, int]
"""Half-open range of addresses."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchTable:
    """What one launch over the experts of many MXFP8 weights reads, fixed by :meth:`build`.

    The descriptors hold addresses, and are of no use once a tensor has moved.
    """

    descriptors: Tensor
    """[num_members + num_gaps, 11] int64. A member: the addresses of source, rowwise data and
    scale, columnwise data and scale; rows, cols; the row strides of the four planes in bytes.
    A gap: its address and its number of two-byte units."""
    tiles: Tensor
    """[num_programs, 3] int32: descriptor, first row, first column; of a gap, its first unit."""
    num_tiles: int
    """How many of the tiles belong to members; those of gaps follow."""
    tile: Tile
    source_dtype: torch.dtype
    masked: bool
    """Whether some weight is not a whole number of tiles wide."""
    aligned: bool
    """Whether every row of source and data starts at a multiple of 16 bytes."""
    zeroes: bool
    """Whether a launch leaves zeros in the sources, and in the gaps."""
    alive: tuple[Tensor, ...]
    """Every tensor behind an address."""
    source_memory: tuple[tuple[torch.UntypedStorage, int], ...]
    """Each piece of memory with sources in it, and its address when the table was built."""

    @property
    def num_programs(self) -> int:
        """Size of the grid."""
        return self.tiles.shape[0]

    @property
    def has_moved(self) -> bool:
        """Whether sources lie elsewhere by now: gradient memory can be freed and taken again."""
        return any(memory.data_ptr() != address for memory, address in self.source_memory)

    @classmethod
    def build(
        cls,
        members: Sequence[tuple[Tensor, QuantizedWeight]],
        *,
        consumed: Tensor | None = None,
    ) -> "LaunchTable":
        """Describe stacks of experts on their device.

        Args:
            members: pairs of source [E, R, C], contiguous, fp32 or all bf16, and the MXFP8 storage
                of that shape that takes it, innermost stride 1. At least one.
            consumed: memory that a launch zeroes: all sources lie in it, see :func:`find_gaps`.

        Raises:
            LayoutError: a pair that :func:`can_launch` refuses, sources of two dtypes, or consumed
                memory that does not hold the sources one after the other.
        """
        dtypes = {source.dtype for source, _ in members}
        if len(dtypes) != 1 or not all(can_launch(*pair) for pair in members):
            raise LayoutError(
                "launch table: expected MXFP8 weights with planes of innermost stride 1 and "
                f"sources of one dtype, got {len(members)} stacks of sources in "
                f"{sorted(map(str, dtypes))}. Requantize them without a launch."
            )
        sources = [source for source, _ in members]
        gaps = [] if consumed is None else find_gaps(consumed, sources)
        if gaps is None:
            raise LayoutError(
                "launch table: expected consumed memory that is contiguous and holds every "
                "source once, got other memory. Zero it apart from the launch."
            )
        (dtype,) = dtypes
        tile = REQUANTIZE_MXFP8[dtype]
        device = sources[0].device
        descriptors = torch.cat([*(_describe(*pair) for pair in members), _describe_gaps(gaps)])
        member_tiles = _cut_members([target.shape for _, target in members], tile)
        gap_tiles = _cut_gaps(sum(target.shape[0] for _, target in members), gaps)
        memory = {part.data_ptr(): part for part in (s.untyped_storage() for s in sources)}
        planes = [plane for _, target in members for plane in target.planes().values()]
        return cls(
            descriptors=descriptors.to(device),
            tiles=torch.cat([member_tiles, gap_tiles]).to(device, torch.int32),
            num_tiles=member_tiles.shape[0],
            tile=tile,
            source_dtype=dtype,
            masked=any(source.shape[2] % tile.cols for source in sources),
            aligned=all(_is_aligned(*pair) for pair in members),
            zeroes=consumed is not None,
            alive=(*sources, *planes, *(() if consumed is None else (consumed,))),
            source_memory=tuple((part, address) for address, part in memory.items()),
        )


def can_launch(source: Tensor, target: QuantizedWeight) -> bool:
    """Return whether the kernel can address these experts, of which there must be some."""
    if target.format != MXFP8 or source.numel() == 0:
        return False
    planes = list(target.planes().values())
    reach = max(source.shape[2], *(plane.stride(1) for plane in planes)) * BLOCK
    # Offsets within a tile are 32 bits wide, all others 64.
    return reach < 1 << 31 and all(plane.stride(2) == 1 for plane in planes)


def find_gaps(consumed: Tensor, sources: Sequence[Tensor]) -> list[Range] | None:
    """Return the address ranges of ``consumed`` outside the sources, ascending.

    Args:
        consumed: any tensor.
        sources: contiguous tensors.

    Returns:
        None where ``consumed`` is not one range of whole two-byte units that holds every source
        entirely, or two sources overlap.
    """
    start, end = _range_of(consumed)
    if not consumed.is_contiguous() or (end - start) % 2:
        return None
    gaps = []
    for source_start, source_end in sorted(map(_range_of, sources)):
        if source_start < start or source_end > end:
            return None
        if source_start > start:
            gaps.append((start, source_start))
        start = source_end
    return [*gaps, (start, end)] if start < end else gaps


def _range_of(tensor: Tensor) -> Range:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _describe(source: Tensor, target: QuantizedWeight) -> Tensor:
    """Return the descriptors of a stack of experts, [E, 11] int64 on the CPU."""
    experts, rows, cols = target.shape
    planes = [plane(name) for name in DIRECTIONS for plane in (target.data, target.scale)]
    numbers = torch.arange(experts, device="cpu")
    addresses = [
        tensor.data_ptr() + numbers * (tensor.stride(0) * tensor.element_size())
        for tensor in (source, *planes)
    ]
    constants = [rows, cols, *(plane.stride(1) for plane in planes)]
    return torch.stack([*addresses, *(torch.full_like(numbers, value) for value in constants)], 1)


def _describe_gaps(gaps: Sequence[Range]) -> Tensor:
    rows = [
        [address, min(_MAX_GAP, (end - address) // 2), *[0] * (DESCRIPTOR_FIELDS - 2)]
        for start, end in gaps
        for address in range(start, end, 2 * _MAX_GAP)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, DESCRIPTOR_FIELDS)


def _cut_members(shapes: Sequence[tuple[int, int, int]], tile: Tile) -> Tensor:
    """Return the tiles of all experts in the order of their memory, [num_tiles, 3] int64."""
    parts, first = [], 0
    for experts, rows, cols in shapes:
        axes = (
            torch.arange(first, first + experts, device="cpu"),
            torch.arange(0, rows, BLOCK, device="cpu"),
            torch.arange(0, cols, tile.cols, device="cpu"),
        )
        parts.append(torch.cartesian_prod(*axes).view(-1, 3))
        first += experts
    return torch.cat(parts)


def _cut_gaps(first: int, gaps: Sequence[Range]) -> Tensor:
    """Return the tiles of the gaps, whose descriptors start at ``first``; [num_tiles, 3] int64."""
    units = _describe_gaps(gaps)[:, 1].tolist()
    rows = [
        [first + index, 0, start]
        for index, count in enumerate(units)
        for start in range(0, count, GAP_TILE)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3)


def _is_aligned(source: Tensor, target: QuantizedWeight) -> bool:
    distances = [source.data_ptr(), source.shape[2] * source.element_size()]
    for plane in (target.rowwise_data, target.columnwise_data):
        distances += [plane.data_ptr(), plane.stride(1)]
        distances += [plane.stride(0)] if plane.shape[0] > 1 else []
    return all(distance % _ALIGNMENT == 0 for distance in distances)
