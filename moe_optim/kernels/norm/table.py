"""What one launch over gradients reads, and where their squared norm lies after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.member_table import Backend, runs_triton
from moe_optim.kernels.tuning import NORM
from moe_optim.places import Places

PART_FIELDS = 4
"""Columns of :attr:`NormTable.parts`."""

_LINE = 128  # bytes of a cache line


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What a rank owns of some gradients, and the norm that they count in."""

    values: Tensor
    """[numel] fp32 or bf16, contiguous, at any address; may be empty."""
    group: int = 0
    """Index into :attr:`NormTable.squares`; 0 is the main norm."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NormTable:
    """Gradients where they lie, and the sums of their squares. See :meth:`build`.

    On a GPU it holds addresses, and no launch may be made once gradients have moved.
    """

    gradients: tuple[Gradients, ...]
    """All that is summed."""
    squares: Tensor
    """[num_groups] fp64: the sum of squares of each group, written anew by every launch."""
    zeros: Tensor
    """[1] int64: elements that are 0.0 or -0.0, over all groups, written anew by every launch; 0 if
    the table does not count them."""
    counts_zeros: bool
    """Whether ``zeros`` is written."""
    has_kernels: bool
    """Whether kernels sum, or the reference does."""
    parts: Mapping[torch.dtype, Tensor]
    """[num_parts, 4] int64 for each dtype: the address of a cache line, the first and last element
    that count from there, and the slot of the sum."""
    bounds: Tensor
    """[num_groups + 1] int64: the slots of each group follow those of the one before."""
    sums: Tensor
    """[num_slots] fp64: the squares of each part."""
    zero_sums: Tensor
    """[num_slots] int32: the zeros of each part; empty if the table does not count them."""
    sources: Places
    """A gradient of each piece of memory."""
    kernels: list[BoundKernel] = field(default_factory=list)
    """Filled by the first launch."""

    @property
    def has_moved(self) -> bool:
        """Whether gradients lie elsewhere by now: their memory can be freed or exchanged."""
        return self.sources.have_moved

    @classmethod
    def build(
        cls,
        gradients: Sequence[Gradients],
        *,
        count_zeros: bool = False,
        num_groups: int | None = None,
        device: torch.device | str | None = None,
        backend: Backend = "auto",
    ) -> "NormTable":
        """Describe gradients on their device; nothing is copied.

        Args:
            gradients: may be empty, each of them and all of them.
            count_zeros: whether a launch counts zeros, too.
            num_groups: length of ``squares``; as many as the gradients name if not given.
                Ranks that add up their squares give it, as some may own nothing of a group.
            device: of the results, which is that of the gradients; needed where there are none.
            backend: ``auto`` takes kernels where they run, ``reference`` does without.

        Raises:
            LayoutError: gradients that are not flat, of another dtype, on several devices, or in a
                group that does not exist.
        """
        home = _find_device(gradients, device)
        named = max((one.group for one in gradients), default=0) + 1
        groups = named if num_groups is None else num_groups
        for index, one in enumerate(gradients):
            _check(one, f"norm table: gradients[{index}]", home, groups)
        owned = [one for one in gradients if one.values.numel()]
        has_kernels = backend == "auto" and runs_triton(home)
        parts, bounds = _cut_parts(owned if has_kernels else [], groups)
        slots = sum(len(rows) for rows in parts.values())
        of_each_memory = {one.values.untyped_storage().data_ptr(): one.values for one in owned}
        return cls(
            gradients=tuple(gradients),
            squares=torch.zeros(groups, dtype=torch.float64, device=home),
            zeros=torch.zeros(1, dtype=torch.int64, device=home),
            counts_zeros=count_zeros,
            has_kernels=has_kernels,
            parts=MappingProxyType({dtype: rows.to(home) for dtype, rows in parts.items()}),
            bounds=bounds.to(home),
            sums=torch.zeros(slots, dtype=torch.float64, device=home),
            zero_sums=torch.zeros(slots if count_zeros else 0, dtype=torch.int32, device=home),
            sources=Places(of_each_memory.values()),
        )


def _find_device(gradients: Sequence[Gradients], device: torch.device | str | None) -> torch.device:
    """Return the device of the results, with its index as tensors have it."""
    if gradients and device is None:
        return gradients[0].values.device
    return torch.empty(0, dtype=torch.uint8, device=device).device


def _check(one: Gradients, where: str, device: torch.device, num_groups: int) -> None:
    values = one.values
    if values.dim() != 1 or not values.is_contiguous():
        raise LayoutError(
            f"{where}: expected a flat contiguous tensor, got shape {list(values.shape)} with "
            f"strides {list(values.stride())}. Pass a view of the memory that gradients lie in."
        )
    if values.dtype not in NORM:
        raise LayoutError(
            f"{where}: expected gradients in fp32 or bf16, got {values.dtype}. Let stock Megatron "
            "find the norm of others."
        )
    if values.device != device:
        raise LayoutError(
            f"{where}: expected gradients on {device}, got {values.device}. Build a table for each "
            "device."
        )
    if not 0 <= one.group < num_groups:
        raise LayoutError(
            f"{where}: expected a group from 0 to {num_groups - 1}, got {one.group}. Give the "
            "table a larger num_groups, or the gradients another group."
        )


def _cut_parts(
    owned: Sequence[Gradients], num_groups: int
) -> tuple[dict[torch.dtype, Tensor], Tensor]:
    """Return the parts by dtype, and the bounds of the groups, as the table has them; on the CPU.

    Args:
        owned: none of them empty, in any order of groups.
        num_groups: of the table.
    """
    ordered = sorted(owned, key=lambda one: one.group)  # stable
    tiles = [NORM[one.values.dtype] for one in ordered]
    address = _on_cpu([one.values.data_ptr() for one in ordered])
    size = _on_cpu([one.values.element_size() for one in ordered])
    length = _on_cpu([tile.numel * tile.num_tiles for tile in tiles])
    begin = address % _LINE // size
    end = begin + _on_cpu([one.values.numel() for one in ordered])
    counts = (end + length - 1) // length

    slots = torch.arange(int(counts.sum()), device="cpu")
    which = torch.arange(len(ordered), device="cpu").repeat_interleave(counts)
    first = (slots - (counts.cumsum(0) - counts)[which]) * length[which]
    lines = (address // _LINE * _LINE)[which] + first * size[which]
    begins = (begin[which] - first).clamp(min=0)
    ends = torch.minimum(end[which] - first, length[which])
    parts = torch.stack([lines, begins, ends, slots], 1)

    of_dtype = {dtype: size[which] == dtype.itemsize for dtype in NORM}
    groups = _on_cpu([one.group for one in ordered])[which]
    bounds = torch.searchsorted(groups, torch.arange(num_groups + 1, device="cpu"))
    return {dtype: parts[rows] for dtype, rows in of_dtype.items() if rows.any()}, bounds


def _on_cpu(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
