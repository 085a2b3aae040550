"""What one launch over masters and buffers reads, and where its sums lie."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_optim.formats import BlockScaledFormat, QuantizedWeight
from moe_optim.formats.health_figures import NUM_SUMS, Sum
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.launch_table import (
    can_launch,
    describe_members,
    grid_of_tiles,
    is_aligned,
    owned_experts,
)
from moe_optim.kernels.member_table import Backend, has_kernels
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import HEALTH_ROWS, HEALTH_TILE
from moe_optim.places import Places


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HealthEntry:
    """What a rank owns of one weight, and where its sums go."""

    entry: TableEntry
    """Masters are its source, buffers its target, complete, as after a gather."""
    rows: Tensor
    """[E] int64 on the CPU: the row of each expert in the sums of the table."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HealthLaunch:
    """The weights of one format, from masters of one dtype."""

    format: BlockScaledFormat
    source_dtype: torch.dtype
    descriptors: Tensor
    """[num_members, 15] int64, see ``LaunchTable``; the row of sums in place of the amax's slot."""
    whole_tiles: Tensor
    """[num_whole, 4] int32: descriptor, first row, first column, part. All of these is owned."""
    cut_tiles: Tensor
    """[num_cut, 4] int32, the same: weights and shards end inside, or their rows are unaligned."""
    bounds: Tensor
    """[num_members + 1] int64: where the parts of each begin."""
    parts: Tensor
    """[num_parts, NUM_SUMS] fp64: sums of each tile, rewritten by a pass, but for what is counted
    beforehand: the first part of a member has all its elements and blocks."""
    kernels: list[BoundKernel] = field(default_factory=list)
    """Filled by the first launch."""

    @property
    def num_launches(self) -> int:
        """Kernels that one pass starts: over whole tiles, over cut ones, over the parts of both."""
        return sum(len(grid) > 0 for grid in (self.whole_tiles, self.cut_tiles, self.bounds))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HealthTable:
    """Masters and buffers where they lie, and the sums of their experts. See :meth:`build`.

    On a GPU it holds addresses, and no launch may be made once something has moved.
    """

    entries: tuple[HealthEntry, ...]
    """All that is measured."""
    sums: Tensor
    """[rows, NUM_SUMS] fp64, written anew by every pass; zero where nothing is owned here."""
    amaxes: Tensor
    """[rows] fp32, likewise."""
    launches: tuple[HealthLaunch, ...]
    """What kernels handle, one a format and dtype of masters."""
    remainder: tuple[HealthEntry, ...]
    """What no kernel handles; everything without a suitable GPU."""
    places: Places
    """Of masters and of every buffer that is read: each has memory of its own."""

    @property
    def has_moved(self) -> bool:
        """Whether masters or buffers lie elsewhere by now."""
        return self.places.have_moved

    @classmethod
    def build(
        cls,
        entries: Sequence[HealthEntry],
        num_rows: int,
        *,
        device: torch.device,
        backend: Backend = "auto",
    ) -> "HealthTable":
        """Describe weights on their device; nothing is copied.

        Args:
            entries: may be none, and may own nothing.
            num_rows: experts of all ranks and layers.
            device: of the sums, and of what is in the entries.
            backend: ``auto`` takes the kernel where it runs, ``reference`` does without.

        Raises:
            LayoutError: source and target of an entry do not fit each other.
        """
        groups: dict[tuple[BlockScaledFormat, torch.dtype], list[HealthEntry]] = {}
        remainder = []
        for one in entries:
            one.entry.check()
            if backend == "auto" and has_kernels(device) and can_launch(one.entry):
                key = one.entry.target.format, one.entry.source.dtype
                groups.setdefault(key, []).append(one)
            elif one.entry.source.numel():
                remainder.append(one)
        return cls(
            entries=tuple(entries),
            sums=torch.zeros((num_rows, NUM_SUMS), dtype=torch.float64, device=device),
            amaxes=torch.zeros(num_rows, dtype=torch.float32, device=device),
            launches=tuple(_plan(*kind, group) for kind, group in groups.items()),
            remainder=tuple(remainder),
            places=Places(
                tensor
                for one in entries
                for tensor in (one.entry.source, *_buffers_read(one.entry.target))
            ),
        )


def _buffers_read(target: QuantizedWeight) -> list[Tensor]:
    buffers = (target.rowwise_data, target.rowwise_scale, target.global_amax)
    return [buffer for buffer in buffers if buffer is not None]


def _plan(
    format: BlockScaledFormat, dtype: torch.dtype, group: Sequence[HealthEntry]
) -> HealthLaunch:
    """Describe what is owned of some weights, cut into tiles of each expert."""
    described, tiled = [], []
    aligned: list[bool] = []
    for one in group:
        entry, experts = one.entry, owned_experts(one.entry)
        cols = entry.target.shape[2]
        members = describe_members(entry, experts, one.rows[experts.start : experts.stop])
        described.append(members)
        for low, high in members[:, 11:13].tolist():
            touched = range(low // cols // HEALTH_ROWS * HEALTH_ROWS, -(-high // cols), HEALTH_ROWS)
            member = range(len(aligned), len(aligned) + 1)
            tiled.append(grid_of_tiles(member, touched, cols, HEALTH_TILE, 0))
            aligned.append(is_aligned(entry))
    descriptors, tiles = torch.cat(described), torch.cat(tiled)
    numbers, rows, columns, _ = tiles.unbind(1)
    tiles[:, 3] = torch.arange(len(tiles), device="cpu")
    bounds = pad(numbers.bincount().cumsum(0), (1, 0))
    across, begin, end = descriptors[numbers][:, (6, 11, 12)].unbind(1)
    is_whole = (rows * across >= begin) & ((rows + HEALTH_ROWS) * across <= end)
    is_whole &= columns + HEALTH_TILE.cols <= across
    is_whole &= torch.tensor(aligned, dtype=torch.bool, device="cpu")[numbers]
    parts = torch.zeros((len(tiles), NUM_SUMS), dtype=torch.float64, device="cpu")
    begin, end = descriptors[:, 11], descriptors[:, 12]
    blocks = _blocks_before(end, descriptors, format) - _blocks_before(begin, descriptors, format)
    parts[bounds[:-1], Sum.ELEMENTS] = (end - begin).double()
    parts[bounds[:-1], Sum.BLOCKS] = blocks.double()
    device = group[0].entry.source.device
    return HealthLaunch(
        format=format,
        source_dtype=dtype,
        descriptors=descriptors.to(device),
        whole_tiles=tiles[is_whole].to(device, torch.int32),
        cut_tiles=tiles[~is_whole].to(device, torch.int32),
        bounds=bounds.to(device),
        parts=parts.to(device),
    )


def _blocks_before(place: Tensor, descriptors: Tensor, format: BlockScaledFormat) -> Tensor:
    """Return how many blocks begin before an element of each expert, [num_members] int64."""
    cols, (height, width) = descriptors[:, 6], format.rowwise_block
    across = (cols + width - 1) // width
    beside = (place % (height * cols) + width - 1) // width  # in the top row of its block
    return place // (height * cols) * across + torch.minimum(beside, across)
