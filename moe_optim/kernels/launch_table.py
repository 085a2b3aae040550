"""Requantization of experts of many weights of one format: descriptors, tiles, and kernels."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_optim.formats import DIRECTIONS, BlockScaledFormat
from moe_optim.kernels import fields
from moe_optim.kernels.cutting import cut_ranges, grid, int64
from moe_optim.kernels.exchange import AMAX_SLOTS, Exchange
from moe_optim.kernels.plan import ALIGNMENT, BoundKernel, Call
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import AMAX_TILE, EXPERT_AMAX, GAP_TILE, ROW_TILE_ROWS, TILES, Tile

_MAX_GAP = 1 << 30  # units per descriptor; a tile stores its first unit as int32

Range = tuple[int, int]
"""Half-open range of addresses."""
Planned = tuple[TableEntry, Exchange]
"""Parameter, and the maxima that it shares with other ranks."""


class LaunchTable:
    """Tables that kernels read to requantize weights of one format.

    A member is the part of one expert that this rank owns. Descriptors hold addresses, so a table
    is invalid once a tensor has moved.

    Args:
        planned: parameters of one format that :func:`can_launch` accepts, with sources of one
            dtype, and their exchanges; at least one.
        amax: fp32 slots on the same device: the exchanged ones, then :func:`own_slots`.
        first_free_slot: first slot that only this launch uses.
        gaps: memory that encoding zeroes besides the sources, see :func:`find_gaps`; None to zero
            nothing, as where a block row is cut.
        tile: rectangle per program; by default the fastest for a requantization.

    Attributes:
        descriptors: [num_members + num_gaps, DESCRIPTOR_FIELDS] int64, see ``fields``. A gap
            consists of an address and a number of two-byte units.
        tiles: [num_programs, TILE_FIELDS] int32: descriptor, first row, first column, 0; the rows
            instead of 0 for partial tiles of row-only formats. For a gap, the column is its first
            unit. Tiles of members, ``num_tiles`` of them, come first.
        cut_tiles: tiles of partly owned block rows, [num_cut_tiles, TILE_FIELDS] int32; the last
            column is the slot of the block row's first maximum.
        amax_parts: descriptor and part of each amax program, [num_parts, 2] int32. Empty for
            formats without a global amax.
        amax_slots: first amax slot of each member.
        masked: whether some tile of whole block rows is partial.
        aligned: whether every row of source and data starts at a multiple of 16 bytes.
        zeroes: whether encoding zeroes the sources and the gaps.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        amax: Tensor,
        *,
        first_free_slot: int = 0,
        gaps: Sequence[Range] | None = None,
        tile: Tile | None = None,
    ) -> None:
        entries = [entry for entry, _ in planned]
        self.planned, self.amax, self.zeroes = tuple(planned), amax, gaps is not None
        self.format, self.source_dtype = entries[0].target.format, entries[0].source.dtype
        self.tile = tile or TILES[self.format.name, self.source_dtype]
        members, tiles, cut_tiles, first = [], [], [], 0
        for entry, exchange in planned:
            experts = entry.owned_experts
            own = (first_free_slot + AMAX_SLOTS * (first + index) for index in range(len(experts)))
            slots = [exchange.experts.get(e, slot) for e, slot in zip(experts, own, strict=True)]
            members.append(describe_members(entry, experts, int64(slots)))
            whole, cut = _cut_tiles(entry, exchange, first, self.tile)
            tiles.append(whole)
            cut_tiles.append(cut)
            first += len(experts)
        described, described_gaps = torch.cat(members), _describe_gaps(gaps or ())
        parts = cut_amax_parts(described if self.format.has_global_amax else described[:0])
        self.amax_slots = described[:, fields.AMAX_SLOT].tolist()
        self.num_tiles = sum(map(len, tiles))
        self.masked = any(bool(whole[:, 3].any()) for whole in tiles) or any(
            entry.target.shape[2] % self.tile.cols
            or entry.target.shape[1] % self.format.block_row_height
            for entry in entries
        )
        self.aligned = all(map(is_aligned, entries))
        tiles.append(_cut_gaps(first, described_gaps))
        device = entries[0].source.device
        self.descriptors = torch.cat([described, described_gaps]).to(device)
        self.tiles, self.cut_tiles, self.amax_parts = (
            table.to(device, torch.int32)
            for table in (torch.cat(tiles), torch.cat(cut_tiles), parts)
        )

    @cached_property
    def expert_maxima(self) -> list[Call]:
        """Kernel that fills the amax slots of experts; none for formats without a global amax."""
        if not len(self.amax_parts):
            return []
        arguments = self.descriptors, self.amax_parts, self.amax
        return [bind_expert_amax(*arguments, self.source_dtype, self.aligned)]

    @cached_property
    def cut_maxima(self) -> list[Call]:
        """Kernel that fills the amax slots of cut block rows; none without any."""
        if not len(self.cut_tiles):
            return []
        from moe_optim.kernels.amax_kernel import cut_block_row_amax_kernel

        kernel = BoundKernel(
            cut_block_row_amax_kernel,
            len(self.cut_tiles),
            self.descriptors,
            self.cut_tiles,
            self.amax,
            BLOCK_ROW=self.format.block_row_height,
            BLOCK=self.format.rowwise_block[1],
            ONE_WAY=len(self.format.gathered_directions) == 1,
            TILE_COLS=self.tile.cols,
            FROM_FP32=self.source_dtype == torch.float32,
            num_warps=self.tile.num_warps,
        )
        return [kernel]

    @cached_property
    def encode_whole(self) -> list[Call]:
        """Kernel that encodes whole block rows, and zeroes sources and gaps; none without any."""
        return [self.bind()] if len(self.tiles) else []

    @cached_property
    def encode_cut(self) -> list[Call]:
        """Kernel that encodes cut block rows; none without any."""
        return [self.bind(cut=True)] if len(self.cut_tiles) else []

    def bind(
        self, *states: Tensor, cut: bool = False, aligned: bool = True, **of_update: str
    ) -> BoundKernel:
        """Return the kernel that encodes whole or cut block rows, after an update of ``states``.

        ``states`` are states, hyper-parameters and clip factors, or none; ``of_update`` are the
        constants of the rule, see ``update_tile``. ``aligned`` states whether states are.
        """
        tiles, num_tiles = self.tiles, self.num_tiles
        if cut:
            tiles, num_tiles = self.cut_tiles, len(self.cut_tiles)
        kernel, of_format = _choose_kernel(self.format, self.tile, cut=cut)
        return BoundKernel(
            kernel,
            len(tiles),
            self.descriptors,
            tiles,
            self.amax,
            num_tiles,
            *(states or (None, None, None)),
            **of_format,
            TILE_COLS=self.tile.cols,
            FROM_FP32=self.source_dtype == torch.float32,
            MASKED=self.masked,
            ALIGNED=aligned and self.aligned,
            CUT=cut,
            ZERO=self.zeroes,
            **(of_update or {"RULE": "none", "GRADIENT": "none", "MOMENTS": "none"}),
            num_warps=self.tile.num_warps,
            registers=self.tile.registers,
        )


def _choose_kernel(
    format: BlockScaledFormat, tile: Tile, *, cut: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the kernel that encodes a format, and the constants that only it has."""
    if format.is_row_only:
        from moe_optim.kernels.requantize_rows import requantize_rows_kernel

        return requantize_rows_kernel, {
            "ELEMENT": format.element,
            "SCALE": format.scale_encoding,
            "DATA_MAX": format.data_max,
            "BLOCK": format.block_length,
            "TILE_ROWS": 1 if cut else tile_rows(format, tile),
        }
    if format.is_2d:
        from moe_optim.kernels.requantize_blocks import requantize_blocks_kernel

        block_row = format.block_row_height
        held = tile.rows or block_row
        of_format = {"FORMAT": format.name, "BLOCK": block_row, "HELD_ROWS": held}
        return requantize_blocks_kernel, of_format
    from moe_optim.kernels.requantize_mxfp8 import requantize_mxfp8_kernel

    return requantize_mxfp8_kernel, {}


def tile_rows(format: BlockScaledFormat, tile: Tile) -> int:
    """Return the rows of a tile: a block row, or several of a row-only format."""
    return tile.rows or 1 if format.is_row_only else format.block_row_height


def bind_expert_amax(
    descriptors: Tensor, parts: Tensor, slots: Tensor, dtype: torch.dtype, aligned: bool
) -> BoundKernel:
    """Return the kernel that computes the amax of every part of every member."""
    from moe_optim.kernels.amax_kernel import expert_amax_kernel

    return BoundKernel(
        expert_amax_kernel,
        len(parts),
        descriptors,
        parts,
        slots,
        FROM_FP32=dtype == torch.float32,
        ALIGNED=aligned,
        TILE=EXPERT_AMAX.numel,
        num_warps=EXPERT_AMAX.num_warps,
    )


def own_slots(planned: Sequence[Planned]) -> int:
    """Return the number of amax slots that only a launch over these parameters uses."""
    if not planned[0][0].target.format.has_global_amax:
        return 0
    return AMAX_SLOTS * sum(len(entry.owned_experts) for entry, _ in planned)


def can_launch(entry: TableEntry) -> bool:
    """Return whether this rank owns a part of the parameter that a kernel can address."""
    target = entry.target
    if entry.source.numel() == 0:
        return False
    buffers = [buffer for buffer in target.gathered_buffers().values() if buffer.dim() == 3]
    widest = max(target.shape[2], *(buffer.stride(1) for buffer in buffers))
    height = ROW_TILE_ROWS if target.format.is_row_only else target.format.block_row_height
    reach = widest * height
    # Offsets within a tile are 32-bit, all others 64-bit.
    return reach < 1 << 31 and all(buffer.stride(2) == 1 for buffer in buffers)


def is_aligned(entry: TableEntry) -> bool:
    """Return whether every row of source and data starts at a multiple of 16 bytes."""
    source, target = entry.source, entry.target
    width = source.element_size()
    distances = [source.data_ptr(), entry.start * width, target.shape[2] * width]
    for name, buffer in target.gathered_buffers().items():
        if name.endswith("_data"):
            distances += [buffer.data_ptr(), buffer.stride(1)]
            distances += [buffer.stride(0)] if buffer.shape[0] > 1 else []
    return all(distance % ALIGNMENT == 0 for distance in distances)


def describe_members(entry: TableEntry, experts: range, slots: Tensor) -> Tensor:
    """Return a descriptor per owned expert, [experts, DESCRIPTOR_FIELDS] int64 on the CPU."""
    source, target = entry.source, entry.target
    _, rows, cols = target.shape
    numel = rows * cols
    numbers = torch.arange(experts.start, experts.stop, device="cpu")
    zero = torch.zeros_like(numbers)

    def addresses(buffer: Tensor | None) -> Tensor:
        if buffer is None:
            return zero
        return buffer.data_ptr() + numbers * (buffer.stride(0) * buffer.element_size())

    gathered = target.gathered_buffers()
    names = [f"{direction}_{kind}" for direction in DIRECTIONS for kind in ("data", "scale")]
    buffers = [gathered.get(name) for name in names]
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


def amax_part_length[Count: (int, Tensor)](numel: Count) -> Count:
    """Return the elements per part of an expert: whole tiles, at most ``AMAX_SLOTS`` parts."""
    return -(-numel // (AMAX_SLOTS * AMAX_TILE)) * AMAX_TILE


def cut_amax_parts(descriptors: Tensor) -> Tensor:
    """Return descriptor and index of every part of every member, [num_parts, 2] int64."""
    owned = descriptors[:, fields.END] - descriptors[:, fields.BEGIN]
    members, numbers, _ = cut_ranges(owned, amax_part_length(owned))
    return torch.stack([members, numbers], 1)


def find_gaps(consumed: Tensor, sources: Sequence[Tensor]) -> list[Range] | None:
    """Return the address ranges of ``consumed`` outside the contiguous ``sources``, ascending.

    Returns None if two sources overlap, or ``consumed`` is not contiguous, not a whole number of
    two-byte units, or does not contain every source.
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


def _describe_gaps(gaps: Sequence[Range]) -> Tensor:
    rows = [
        [address, min(_MAX_GAP, (end - address) // 2), *[0] * (fields.DESCRIPTOR_FIELDS - 2)]
        for start, end in gaps
        for address in range(start, end, 2 * _MAX_GAP)
    ]
    return int64(rows).view(-1, fields.DESCRIPTOR_FIELDS)


def _cut_gaps(first: int, gaps: Tensor) -> Tensor:
    """Return the tiles of gaps whose descriptors start at ``first``."""
    members, numbers, _ = cut_ranges(gaps[:, 1], GAP_TILE)
    zero = torch.zeros_like(members)
    return torch.stack([first + members, zero, numbers * GAP_TILE, zero], 1)


def _cut_tiles(
    entry: TableEntry, exchange: Exchange, first: int, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Return the tiles of whole and cut block rows in memory order, [n, TILE_FIELDS] int64 each."""
    format, cols = entry.target.format, entry.target.shape[2]
    height, step = format.block_row_height, tile_rows(format, tile)
    experts = entry.owned_experts
    inner = range(experts.start + 1, experts.stop - 1)  # all entirely owned
    groups = [range(e, e + 1) for e in sorted({experts.start, experts.stop - 1} - {*inner})]
    none = torch.empty((0, fields.TILE_FIELDS), dtype=torch.int64, device="cpu")
    whole, cut = [none], [none]
    for group in (groups[0], inner, *groups[1:]):
        if not group:
            continue
        part = entry.owned_part(group.start)
        columns = range(0, cols, tile.cols)
        numbers = range(first + group.start - experts.start, first + group.stop - experts.start)
        whole_rows = range(part.first_whole // cols, part.end_whole // cols, step)
        tiles = grid(numbers, whole_rows, columns, range(1))
        if format.is_row_only:
            rows = (whole_rows.stop - tiles[:, 1]).clamp(max=step)
            is_partial = (rows < step) | (tiles[:, 2] + tile.cols > cols)
            tiles[:, 3] = rows * is_partial
        whole.append(tiles)
        touched = range(part.low // (height * cols) * height, -(-part.high // cols), height)
        for (expert, row), slot in exchange.block_rows.items():
            if expert == group.start and row in touched:
                cut.append(grid(numbers, range(row, row + 1), columns, range(slot, slot + 1)))
    return torch.cat(whole), torch.cat(cut)
