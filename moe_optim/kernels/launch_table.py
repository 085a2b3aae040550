"""Device descriptors of one launch: pointers, shapes and strides of its members, and its tiles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import DIRECTIONS, BlockScaledFormat, round_up
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.exchange import AMAX_SLOTS, Exchange
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import TILES, Tile
from moe_optim.places import Places

DESCRIPTOR_FIELDS = 15
"""Columns of :attr:`LaunchTable.descriptors`."""
STATE_FIELDS = 6
"""Columns of the states of a step, see ``RangeLaunch``."""
HYPER_FIELDS = 9
"""Columns of the hyper-parameters of a step: beta1, 1 - beta1, beta2, 1 - beta2, the bias
corrections of both moments, eps, weight decay, minus the learning rate."""
TILE_FIELDS = 4
"""Columns of :attr:`LaunchTable.tiles` and :attr:`LaunchTable.cut_tiles`."""
GAP_TILE = 4096
"""Two-byte units that one program zeroes outside the members."""
AMAX_TILE = 4096
"""Elements that one program reads at a time when it looks for the amax of an expert."""

_ALIGNMENT = 16  # bytes of the widest memory access
_MAX_GAP = 1 << 30  # units a descriptor; a tile keeps its first one in an int32

Range = tuple[int, int]
"""Half-open range of addresses."""
Planned = tuple[TableEntry, Exchange]
"""A parameter, and the maxima it shares with other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchTable:
    """What one launch over the experts of many weights of one format reads; see :meth:`build`.

    A member is what a rank owns of one expert. The descriptors hold addresses, and are of no use
    once a tensor has moved.
    """

    format: BlockScaledFormat
    planned: tuple[Planned, ...]
    """The parameters, and what they exchange."""
    descriptors: Tensor
    """[num_members + num_gaps, 15] int64. A member: the addresses of its expert's first element in
    the source, of rowwise data and scale, columnwise data and scale (0 where it does not travel);
    rows, cols; the row strides of these four buffers in elements; first and last owned element of
    the expert; the slot of its amax; the address of its global amax, or 0.
    A gap: its address and its number of two-byte units."""
    num_members: int
    """Experts of which this rank owns something; their descriptors come first."""
    tiles: Tensor
    """[num_programs, 4] int32: descriptor, first row, first column, 0; of a gap, its first unit in
    place of the column."""
    num_tiles: int
    """How many of the tiles belong to members; those of gaps follow."""
    cut_tiles: Tensor
    """[num_cut_tiles, 4] int32: the same for block rows that are only partly owned, and the slot of
    the block row's first maximum."""
    amax_parts: Tensor
    """[num_parts, 2] int32: descriptor, and which part of its elements; a program finds the amax of
    one part. Empty for formats without a global amax."""
    amax: Tensor
    """fp32 slots, shared with the other launches of a table."""
    tile: Tile
    source_dtype: torch.dtype
    masked: bool
    """Whether some weight is not a whole number of tiles wide, or of block rows high."""
    aligned: bool
    """Whether every row of source and data starts at a multiple of 16 bytes."""
    zeroes: bool
    """Whether a launch leaves zeros in the sources, and in the gaps."""
    alive: tuple[Tensor, ...]
    """Every tensor behind an address."""
    sources: Places
    """One of each piece of memory that has some."""
    amax_slots: tuple[int, ...]
    """The slot of the amax of each member."""
    kernels: dict[str, tuple[BoundKernel, ...]] = field(default_factory=dict)
    """Filled by the first launch."""

    @property
    def num_programs(self) -> int:
        """Size of the grid over whole block rows and gaps."""
        return self.tiles.shape[0]

    @property
    def num_cut_tiles(self) -> int:
        """Size of the grid over cut block rows."""
        return self.cut_tiles.shape[0]

    @property
    def num_launches(self) -> int:
        """Kernels that one requantization starts: amaxes, whole block rows, cut block rows."""
        grids = (self.amax_parts, self.tiles, self.cut_tiles, self.cut_tiles)  # cut ones twice
        return sum(len(grid) > 0 for grid in grids)

    @property
    def has_moved(self) -> bool:
        """Whether sources lie elsewhere by now: their memory can be freed or exchanged."""
        return self.sources.have_moved

    @classmethod
    def build(
        cls,
        planned: Sequence[Planned],
        amax: Tensor,
        *,
        first_free_slot: int = 0,
        consumed: Tensor | None = None,
        tile: Tile | None = None,
    ) -> "LaunchTable":
        """Describe weights of one format on their device.

        Args:
            planned: parameters that :func:`can_launch` accepts, with sources of one dtype, and what
                they exchange. At least one.
            amax: fp32 slots on the same device: those exchanged, then :func:`own_slots` of them.
            first_free_slot: first slot that is this launch's alone.
            consumed: memory that a launch zeroes: all sources lie in it, see :func:`find_gaps`, and
                no block row is cut.
            tile: what one program handles; by default what is best for a requantization.

        Raises:
            LayoutError: parameters that do not fit one launch, or consumed memory that does not
                hold the sources one after the other.
        """
        entries = [entry for entry, _ in planned]
        kinds = {(entry.target.format, entry.source.dtype) for entry in entries}
        if len(kinds) != 1 or not all(map(can_launch, entries)):
            names = sorted(f"{format.name} from {dtype}" for format, dtype in kinds)
            raise LayoutError(
                "launch table: expected weights of one format whose buffers have an innermost "
                f"stride of 1, and sources of one dtype, got {len(entries)} weights: "
                f"{', '.join(names)}. Requantize them without a launch."
            )
        sources = [entry.source for entry in entries]
        gaps = [] if consumed is None else find_gaps(consumed, sources)
        cuts = any(exchange.block_rows for _, exchange in planned)
        if gaps is None or (consumed is not None and cuts):
            raise LayoutError(
                "launch table: expected consumed memory that is contiguous and holds every "
                "source once and whole, got other memory. Zero it apart from the launch."
            )
        ((format, dtype),) = kinds
        tile = tile or TILES[format.name, dtype]
        parts, tiles, cut_tiles, first = [], [], [], 0
        for entry, exchange in planned:
            experts = owned_experts(entry)
            slots = _amax_slots(exchange, experts, first_free_slot + AMAX_SLOTS * first)
            parts.append(describe_members(entry, experts, slots))
            whole, cut = _cut_tiles(entry, exchange, experts, first, tile)
            tiles.append(whole)
            cut_tiles.append(cut)
            first += len(experts)
        device = sources[0].device
        num_tiles = sum(part.shape[0] for part in tiles)
        of_each_memory = {source.untyped_storage().data_ptr(): source for source in sources}
        gathered = [entry.target.gathered_buffers() for entry in entries]
        buffers = [buffer for of_entry in gathered for buffer in of_entry.values()]
        _, heights, widths = zip(*(entry.target.shape for entry in entries), strict=True)
        return cls(
            format=format,
            planned=tuple(planned),
            descriptors=torch.cat([*parts, _describe_gaps(gaps)]).to(device),
            num_members=first,
            tiles=torch.cat([*tiles, _cut_gaps(first, gaps)]).to(device, torch.int32),
            num_tiles=num_tiles,
            cut_tiles=torch.cat(cut_tiles).to(device, torch.int32),
            amax_parts=_cut_amax_parts(torch.cat(parts), format).to(device, torch.int32),
            amax=amax,
            tile=tile,
            source_dtype=dtype,
            masked=any(width % tile.cols for width in widths)
            or any(height % format.block_row_height for height in heights),
            aligned=all(map(is_aligned, entries)),
            zeroes=consumed is not None,
            alive=(*sources, *buffers, amax, *(() if consumed is None else (consumed,))),
            sources=Places(of_each_memory.values()),
            amax_slots=tuple(torch.cat(parts)[:, 13].tolist()),
        )


def own_slots(planned: Sequence[Planned]) -> int:
    """Return how many amax slots a launch over these parameters needs for itself alone."""
    if not planned[0][0].target.format.has_global_amax:
        return 0
    return AMAX_SLOTS * sum(len(owned_experts(entry)) for entry, _ in planned)


def can_launch(entry: TableEntry) -> bool:
    """Return whether a kernel can address what there is of these experts, if there is something."""
    target = entry.target
    if entry.source.numel() == 0:
        return False
    buffers = [buffer for buffer in target.gathered_buffers().values() if buffer.dim() == 3]
    widest = max(target.shape[2], *(buffer.stride(1) for buffer in buffers))
    reach = widest * target.format.block_row_height
    # Offsets within a tile are 32 bits wide, all others 64.
    return reach < 1 << 31 and all(buffer.stride(2) == 1 for buffer in buffers)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedPart:
    """What an entry owns of one expert; elements are counted from the first of the expert."""

    base: int
    """The first element of the expert, counted in the parameter."""
    low: int
    """First owned element."""
    high: int
    """One past the last."""
    first_whole: int
    """First element of the first block row that is owned as a whole, or ``high``."""
    end_whole: int
    """One past the last of such block rows, not below ``first_whole``."""


def owned_parts(entry: TableEntry) -> Iterator[OwnedPart]:
    """Yield what the entry owns of every expert that it has at least one element of."""
    return (_owned_part(entry, expert) for expert in owned_experts(entry))


def _owned_part(entry: TableEntry, expert: int) -> OwnedPart:
    _, rows, cols = entry.target.shape
    block_row, numel = entry.target.format.block_row_height * cols, rows * cols
    base = expert * numel
    low, high = max(0, entry.start - base), min(numel, entry.end - base)
    first = min(high, round_up(low, block_row))
    end = high if high == numel else high // block_row * block_row
    return OwnedPart(base=base, low=low, high=high, first_whole=first, end_whole=max(first, end))


def owned_experts(entry: TableEntry) -> range:
    """Return the experts of which the entry has at least one element; it has some."""
    _, rows, cols = entry.target.shape
    numel = rows * cols
    return range(entry.start // numel, -(-entry.end // numel))


def _amax_slots(exchange: Exchange, experts: range, first: int) -> Tensor:
    own = [exchange.experts.get(e, first + AMAX_SLOTS * i) for i, e in enumerate(experts)]
    return torch.tensor(own, dtype=torch.int64, device="cpu")


def describe_members(entry: TableEntry, experts: range, slots: Tensor) -> Tensor:
    """Return the descriptors of the owned experts, [len(experts), 15] int64 on the CPU."""
    source, target = entry.source, entry.target
    _, rows, cols = target.shape
    numel = rows * cols
    numbers = torch.arange(experts.start, experts.stop, device="cpu")
    zero = torch.zeros_like(numbers)

    def addresses(buffer: Tensor | None) -> Tensor:
        if buffer is None:
            return zero
        return buffer.data_ptr() + numbers * (buffer.stride(0) * buffer.element_size())

    wire = target.gathered_buffers()
    names = [f"{direction}_{kind}" for direction in DIRECTIONS for kind in ("data", "scale")]
    buffers = [wire.get(name) for name in names]
    columns = [
        source.data_ptr() + (numbers * numel - entry.start) * source.element_size(),
        *(addresses(buffer) for buffer in buffers),
        zero + rows,
        zero + cols,
        *(zero if buffer is None else zero + buffer.stride(1) for buffer in buffers),
        (entry.start - numbers * numel).clamp(min=0),
        (entry.end - numbers * numel).clamp(max=numel),
        slots,
        addresses(target.global_amax),
    ]
    return torch.stack(columns, 1)


def _cut_amax_parts(descriptors: Tensor, format: BlockScaledFormat) -> Tensor:
    """Return a row for every part of every member that has something in it, [num_parts, 2]."""
    if not format.has_global_amax:
        return torch.empty((0, 2), dtype=torch.int64, device="cpu")
    owned = descriptors[:, 12] - descriptors[:, 11]
    length = (owned + AMAX_SLOTS * AMAX_TILE - 1) // (AMAX_SLOTS * AMAX_TILE) * AMAX_TILE
    counts = (owned + length - 1) // length
    members = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    first = torch.cumsum(counts, 0) - counts
    part = torch.arange(len(members), device="cpu") - first[members]
    return torch.stack([members, part], 1)


def _describe_gaps(gaps: Sequence[Range]) -> Tensor:
    rows = [
        [address, min(_MAX_GAP, (end - address) // 2), *[0] * (DESCRIPTOR_FIELDS - 2)]
        for start, end in gaps
        for address in range(start, end, 2 * _MAX_GAP)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, DESCRIPTOR_FIELDS)


def _cut_tiles(
    entry: TableEntry, exchange: Exchange, experts: range, first: int, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Return the tiles of whole and of cut block rows in memory order, both [n, 4] int64.

    Args:
        entry: parameter of which something is owned.
        exchange: which block rows are cut, and their slots.
        experts: the owned ones.
        first: descriptor of the first of them.
        tile: size of a tile.
    """
    cols, height = entry.target.shape[2], entry.target.format.block_row_height
    inner = range(experts.start + 1, experts.stop - 1)  # none of these is owned in part
    groups = [range(e, e + 1) for e in sorted({experts.start, experts.stop - 1} - {*inner})]
    whole, cut = [], []
    for group in (groups[0], inner, *groups[1:]):
        if not group:
            continue
        part = _owned_part(entry, group.start)
        whole_rows = range(part.first_whole // cols, part.end_whole // cols, height)
        numbers = range(first + group.start - experts.start, first + group.stop - experts.start)
        whole.append(grid_of_tiles(numbers, whole_rows, cols, tile, 0))
        touched = range(part.low // (height * cols) * height, -(-part.high // cols), height)
        for row in touched:
            slot = exchange.block_rows.get((group.start, row))
            if slot is not None:
                cut.append(grid_of_tiles(numbers, range(row, row + 1), cols, tile, slot))
    none = torch.empty((0, TILE_FIELDS), dtype=torch.int64, device="cpu")
    return torch.cat([none, *whole]), torch.cat([none, *cut])


def grid_of_tiles(descriptors: range, rows: range, cols: int, tile: Tile, slot: int) -> Tensor:
    """Return the tiles of some rows of some members, [n, 4] int64 on the CPU."""
    axes = (descriptors, rows, range(0, cols, tile.cols), range(slot, slot + 1))
    tensors = [torch.arange(a.start, a.stop, a.step, device="cpu") for a in axes if len(a)]
    if len(tensors) < len(axes):
        return torch.empty((0, TILE_FIELDS), dtype=torch.int64, device="cpu")
    return torch.cartesian_prod(*tensors).view(-1, TILE_FIELDS)


def _cut_gaps(first: int, gaps: Sequence[Range]) -> Tensor:
    """Return the tiles of the gaps, whose descriptors start at ``first``; [num_tiles, 4] int64."""
    units = _describe_gaps(gaps)[:, 1].tolist()
    rows = [
        [first + index, 0, start, 0]
        for index, count in enumerate(units)
        for start in range(0, count, GAP_TILE)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, TILE_FIELDS)


def is_aligned(entry: TableEntry) -> bool:
    """Return whether every row of source and data starts at a multiple of 16 bytes."""
    source, target = entry.source, entry.target
    width = source.element_size()
    distances = [source.data_ptr(), entry.start * width, target.shape[2] * width]
    for name, buffer in target.gathered_buffers().items():
        if name.endswith("_data"):
            distances += [buffer.data_ptr(), buffer.stride(1)]
            distances += [buffer.stride(0)] if buffer.shape[0] > 1 else []
    return all(distance % _ALIGNMENT == 0 for distance in distances)
