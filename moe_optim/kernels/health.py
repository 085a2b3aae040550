"""Plans that measure quantized experts: errors, counts, amaxes and sketches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_optim.formats import BlockScaledFormat
from moe_optim.formats.health_figures import NUM_SUMS, Sum
from moe_optim.formats.reference.health import measure_into
from moe_optim.kernels import fields
from moe_optim.kernels.cutting import grid
from moe_optim.kernels.launch_table import can_launch, describe_members, is_aligned
from moe_optim.kernels.plan import Backend, BoundKernel, Call, Plan, takes_kernels
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import HEALTH_ROWS, HEALTH_TILE
from moe_optim.places import Places


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HealthEntry:
    """Owned part of one weight, and the rows of its sums."""

    entry: TableEntry
    """Masters as the source, complete buffers, as after a gather, as the target."""
    rows: Tensor
    """Row of each expert in the sums of the table, [E] int64 on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HealthTable(Plan):
    """Plan that measures experts into ``sums`` and ``amaxes``. See :meth:`build`.

    Results are deterministic. Added over shards, counts and maxima equal those of whole weights
    exactly, other sums up to fp64 rounding.
    """

    entries: tuple[HealthEntry, ...]
    """All entries."""
    sums: Tensor
    """Sums per expert, [rows, NUM_SUMS] fp64; zero where this rank owns nothing."""
    amaxes: Tensor
    """Amax per expert, [rows] fp32; zero where this rank owns nothing."""

    @classmethod
    def build(
        cls,
        entries: Sequence[HealthEntry],
        num_rows: int,
        *,
        device: torch.device,
        backend: Backend = "auto",
    ) -> "HealthTable":
        """Plan a measurement of weights on their device, without copying.

        Args:
            entries: weights or any parts of them; may be empty.
            num_rows: number of experts of all ranks and layers.
            device: device of the sums and of the entries.
            backend: ``auto`` for kernels where supported, ``reference`` for plain torch.

        Raises:
            LayoutError: source and target of an entry do not match.
        """
        groups: dict[tuple[BlockScaledFormat, torch.dtype], list[HealthEntry]] = {}
        remainder = []
        runs_kernels = takes_kernels(backend, device)
        for one in entries:
            one.entry.check()
            if runs_kernels and can_launch(one.entry):
                key = one.entry.target.format, one.entry.source.dtype
                groups.setdefault(key, []).append(one)
            elif one.entry.source.numel():
                remainder.append(one)
        sums = torch.zeros((num_rows, NUM_SUMS), dtype=torch.float64, device=device)
        amaxes = torch.zeros(num_rows, dtype=torch.float32, device=device)
        calls: list[Call] = [sums.zero_, amaxes.zero_]
        for (format, dtype), group in groups.items():
            calls += _bind(format, dtype, group, sums, amaxes)
        calls += [partial(_measure, one, sums, amaxes) for one in remainder]
        return cls(
            device=device,
            calls=tuple(calls),
            places=Places(tensor for one in entries for tensor in _read(one.entry)),
            entries=tuple(entries),
            sums=sums,
            amaxes=amaxes,
        )


def _read(entry: TableEntry) -> list[Tensor]:
    target = entry.target
    read = (entry.source, target.rowwise_data, target.rowwise_scale, target.global_amax)
    return [tensor for tensor in read if tensor is not None]


def _measure(one: HealthEntry, all_sums: Tensor, all_amaxes: Tensor) -> None:
    rows = one.rows.to(all_sums.device)
    sums, amaxes = all_sums[rows], all_amaxes[rows]
    measure_into(sums, amaxes, one.entry.source, one.entry.start, one.entry.target)
    all_sums[rows], all_amaxes[rows] = sums, amaxes


def _bind(
    format: BlockScaledFormat,
    dtype: torch.dtype,
    group: Sequence[HealthEntry],
    sums: Tensor,
    amaxes: Tensor,
) -> Iterator[BoundKernel]:
    """Yield the launches over whole tiles, over cut tiles, and over the parts of both."""
    from moe_optim.kernels.health_kernel import add_parts_kernel, measure_kernel

    described, tiles, is_whole = _cut(group)
    bounds = pad(tiles[:, 0].bincount().cumsum(0), (1, 0))
    parts = _count(format, described, bounds, len(tiles)).to(sums.device)
    descriptors = described.to(sums.device)
    height, width = format.rowwise_block
    for chosen, whole in ((is_whole, True), (~is_whole, False)):
        if chosen.any():
            yield BoundKernel(
                measure_kernel,
                int(chosen.sum()),
                descriptors,
                tiles[chosen].to(sums.device, torch.int32),
                parts,
                amaxes.view(torch.int32),
                ELEMENT=format.element,
                SCALE=format.scale_encoding,
                DATA_MAX=format.data_max,
                HEIGHT=height,
                WIDTH=width,
                PROGRAM_ROWS=HEALTH_ROWS,
                TILE_COLS=HEALTH_TILE.cols,
                HELD_ROWS=HEALTH_TILE.rows,
                FROM_FP32=dtype == torch.float32,
                WHOLE=whole,
                num_warps=HEALTH_TILE.num_warps,
            )
    yield BoundKernel(
        add_parts_kernel,
        len(descriptors),
        descriptors,
        bounds.to(sums.device),
        parts,
        sums,
        LANES=16,
        COLUMNS=64,
        num_warps=4,
    )


def _cut(group: Sequence[HealthEntry]) -> tuple[Tensor, Tensor, Tensor]:
    """Return descriptors of owned experts, tiles, and which tiles are entirely owned and aligned.

    The AMAX_SLOT column holds the row of the sums; the last tile column holds the part.
    """
    described, tiled = [], []
    aligned: list[bool] = []
    for one in group:
        entry, experts = one.entry, one.entry.owned_experts
        cols = entry.target.shape[2]
        members = describe_members(entry, experts, one.rows[experts.start : experts.stop])
        described.append(members)
        for low, high in members[:, fields.BEGIN : fields.END + 1].tolist():
            touched = range(low // cols // HEALTH_ROWS * HEALTH_ROWS, -(-high // cols), HEALTH_ROWS)
            member = range(len(aligned), len(aligned) + 1)
            tiled.append(grid(member, touched, range(0, cols, HEALTH_TILE.cols), range(1)))
            aligned.append(is_aligned(entry))
    descriptors, tiles = torch.cat(described), torch.cat(tiled)
    numbers, rows, columns, _ = tiles.unbind(1)
    tiles[:, 3] = torch.arange(len(tiles), device="cpu")
    bounds = (fields.COLS, fields.BEGIN, fields.END)
    across, begin, end = descriptors[numbers][:, bounds].unbind(1)
    is_whole = (rows * across >= begin) & ((rows + HEALTH_ROWS) * across <= end)
    is_whole &= columns + HEALTH_TILE.cols <= across
    is_whole &= torch.tensor(aligned, dtype=torch.bool, device="cpu")[numbers]
    return descriptors, tiles, is_whole


def _count(
    format: BlockScaledFormat, descriptors: Tensor, bounds: Tensor, num_parts: int
) -> Tensor:
    """Return zeroed parts, with elements and blocks of each member in its first part."""
    parts = torch.zeros((num_parts, NUM_SUMS), dtype=torch.float64, device="cpu")
    begin, end = descriptors[:, fields.BEGIN], descriptors[:, fields.END]
    blocks = _blocks_before(end, descriptors, format) - _blocks_before(begin, descriptors, format)
    parts[bounds[:-1], Sum.ELEMENTS] = (end - begin).double()
    parts[bounds[:-1], Sum.BLOCKS] = blocks.double()
    return parts


def _blocks_before(place: Tensor, descriptors: Tensor, format: BlockScaledFormat) -> Tensor:
    """Return how many blocks begin before an element of each expert, [num_members] int64."""
    cols, (height, width) = descriptors[:, fields.COLS], format.rowwise_block
    across = (cols + width - 1) // width
    beside = (place % (height * cols) + width - 1) // width  # in the top row of its block
    return place // (height * cols) * across + torch.minimum(beside, across)
