"""Device descriptors of the launch that finds the amax of experts, whatever their format."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.exchange import AMAX_SLOTS
from moe_optim.kernels.launch_table import AMAX_TILE, DESCRIPTOR_FIELDS
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import EXPERT_AMAX

_SOURCE, _BEGIN, _END, _AMAX_SLOT = 0, 11, 12, 13  # all that the kernel reads of a descriptor
_ALIGNMENT = 16  # bytes of the widest memory access


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AmaxTable:
    """The owned parts of experts, and a row of slots for each expert, owned or not.

    The descriptors hold addresses, and are of no use once a source has moved.
    """

    descriptors: Tensor
    """[num_owned, 15] int64, see ``LaunchTable``; only source, range and slot are filled."""
    parts: Tensor
    """[num_parts, 2] int32: descriptor, and which part of its elements."""
    slots: Tensor
    """[num_experts * AMAX_SLOTS] fp32; zeros where there is no part."""
    source_dtype: torch.dtype
    aligned: bool
    """Whether every source and every range starts at a multiple of 16 bytes."""
    alive: tuple[Tensor, ...]
    """Every tensor behind an address."""
    kernels: list[BoundKernel] = field(default_factory=list)
    """Filled by the first launch."""

    @classmethod
    def build(cls, entries: Sequence[TableEntry]) -> "AmaxTable":
        """Describe all experts of some parameters, in order.

        Args:
            entries: at least one; sources of one dtype on one device, any of them empty.

        Raises:
            LayoutError: sources of several dtypes.
        """
        dtypes = {entry.source.dtype for entry in entries}
        if len(dtypes) != 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise LayoutError(f"amax table: expected sources of one dtype, got {names}.")
        rows, slot = [], 0
        for entry in entries:
            rows += _describe(entry, slot)
            slot += entry.target.shape[0] * AMAX_SLOTS
        descriptors = torch.tensor(rows, dtype=torch.int64, device="cpu")
        descriptors = descriptors.view(-1, DESCRIPTOR_FIELDS)
        (dtype,) = dtypes
        begins = descriptors[:, _BEGIN] * dtype.itemsize
        aligned = not ((descriptors[:, _SOURCE] | begins) % _ALIGNMENT).any()
        device = entries[0].source.device
        return cls(
            descriptors=descriptors.to(device),
            parts=_cut_parts(descriptors).to(device, torch.int32),
            slots=torch.zeros(slot, dtype=torch.float32, device=device),
            source_dtype=dtype,
            aligned=bool(aligned),
            alive=tuple(entry.source for entry in entries),
        )

    def find_into(self, out: Tensor) -> None:
        """Write the amax of what is owned of every expert, [num_experts] fp32; else zeros."""
        if len(self.parts):
            if not self.kernels:
                self.kernels.append(_bind(self))
            for kernel in self.kernels:
                kernel()
        torch.amax(self.slots.view(-1, AMAX_SLOTS), 1, out=out)


def _describe(entry: TableEntry, slot: int) -> list[list[int]]:
    """Return a descriptor for every expert of which the entry has an element."""
    _, height, width = entry.target.shape
    numel, size = height * width, entry.source.element_size()
    rows: list[list[int]] = []
    if entry.start == entry.end:
        return rows
    for expert in range(entry.start // numel, -(-entry.end // numel)):
        row = [0] * DESCRIPTOR_FIELDS
        row[_SOURCE] = entry.source.data_ptr() + (expert * numel - entry.start) * size
        row[_BEGIN] = max(0, entry.start - expert * numel)
        row[_END] = min(numel, entry.end - expert * numel)
        row[_AMAX_SLOT] = slot + expert * AMAX_SLOTS
        rows.append(row)
    return rows


def _cut_parts(descriptors: Tensor) -> Tensor:
    """Return the parts that the kernel cuts the elements of each descriptor into, [n, 2] int64."""
    owned = descriptors[:, _END] - descriptors[:, _BEGIN]
    length = -(-owned // (AMAX_SLOTS * AMAX_TILE)) * AMAX_TILE
    parts = [
        [index, part]
        for index, count in enumerate((-(-owned // length)).tolist())
        for part in range(count)
    ]
    return torch.tensor(parts, dtype=torch.int64, device="cpu").view(-1, 2)


def _bind(table: AmaxTable) -> BoundKernel:
    from moe_optim.kernels.amax import expert_amax_kernel

    return BoundKernel(
        expert_amax_kernel,
        len(table.parts),
        table.descriptors,
        table.parts,
        table.slots,
        FROM_FP32=table.source_dtype == torch.float32,
        ALIGNED=table.aligned,
        TILE=EXPERT_AMAX.numel,
        num_warps=EXPERT_AMAX.num_warps,
    )
