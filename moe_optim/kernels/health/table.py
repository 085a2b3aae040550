"""What one launch over masters and planes reads, and where its sums lie."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat
from moe_optim.health import NUM_SUMS
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.launch_table import (
    can_launch,
    describe_members,
    grid_of_tiles,
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
    """Masters are its source, planes its target, complete, as after a gather."""
    rows: Tensor
    """[E] int64 on the CPU: the row of each expert in the sums of the table."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HealthLaunch:
    """The weights of one format, from masters of one dtype."""

    format: BlockScaledFormat
    source_dtype: torch.dtype
    descriptors: Tensor
    """[num_members, 15] int64, see ``LaunchTable``; the row of sums in place of the amax's slot."""
    tiles: Tensor
    """[num_programs, 4] int32: descriptor, first row, first column, 0."""
    kernels: list[BoundKernel] = field(default_factory=list)
    """Filled by the first launch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HealthTable:
    """Masters and planes where they lie, and the sums of their experts. See :meth:`build`.

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
    """Of masters and rowwise planes."""

    @property
    def has_moved(self) -> bool:
        """Whether masters or planes lie elsewhere by now."""
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
                for tensor in (one.entry.source, one.entry.target.rowwise_data)
            ),
        )


def _plan(
    format: BlockScaledFormat, dtype: torch.dtype, group: Sequence[HealthEntry]
) -> HealthLaunch:
    """Describe what is owned of some weights, cut into tiles of whole bands of each expert."""
    descriptors, tiles, first = [], [], 0
    for one in group:
        entry, experts = one.entry, owned_experts(one.entry)
        _, rows, cols = entry.target.shape
        descriptors.append(describe_members(entry, experts, one.rows[experts.start : experts.stop]))
        for index, expert in enumerate(experts):
            low = max(0, entry.start - expert * rows * cols)
            high = min(rows * cols, entry.end - expert * rows * cols)
            touched = range(low // cols // HEALTH_ROWS * HEALTH_ROWS, -(-high // cols), HEALTH_ROWS)
            member = range(first + index, first + index + 1)
            tiles.append(grid_of_tiles(member, touched, cols, HEALTH_TILE, 0))
        first += len(experts)
    device = group[0].entry.source.device
    return HealthLaunch(
        format=format,
        source_dtype=dtype,
        descriptors=torch.cat(descriptors).to(device),
        tiles=torch.cat(tiles).to(device, torch.int32),
    )
