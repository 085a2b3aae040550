"""Plan that computes the squared norm of gradients in place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats.reference.arithmetic import count_zeros as count_zeros_of
from moe_optim.formats.reference.arithmetic import sum_squares
from moe_optim.kernels.cutting import cut_ranges, int64
from moe_optim.kernels.plan import Backend, BoundKernel, Call, Plan, require_flat, takes_kernels
from moe_optim.kernels.tuning import NORM, NORM_LANES
from moe_optim.places import Places

_LINE = 128  # bytes of a cache line


@dataclass(frozen=True, slots=True, eq=False)
class NormInput:
    """Gradient, or the owned part of it, and its norm group."""

    values: Tensor
    """Gradient, [numel] fp32 or bf16, contiguous, at any address; may be empty."""
    group: int = 0
    """Index into :attr:`NormTable.squares`; 0 is the main norm."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NormTable(Plan):
    """Plan that sums the squares of gradients in place. See :meth:`build`.

    A launch writes ``squares``, and ``zeros`` if enabled. Squares are exact in fp64 and summed in a
    fixed order; rounded to fp32, the result does not depend on how elements are split into tensors.
    NaN and Inf affect only their group.
    """

    gradients: tuple[NormInput, ...]
    """All inputs."""
    squares: Tensor
    """Sum of squares of each group, [num_groups] fp64."""
    zeros: Tensor
    """Number of elements equal to 0.0 or -0.0 over all groups, [1] int64; 0 if not counted."""
    counts_zeros: bool
    """Whether a launch counts zeros."""

    @classmethod
    def build(
        cls,
        gradients: Sequence[NormInput],
        *,
        count_zeros: bool = False,
        num_groups: int | None = None,
        device: torch.device | str | None = None,
        backend: Backend = "auto",
    ) -> "NormTable":
        """Plan a norm on the device of the gradients, without copying.

        Args:
            gradients: inputs, any number, each of any size.
            count_zeros: whether a launch also counts zeros.
            num_groups: length of ``squares``, by default the highest group plus one. Required if
                ranks add their squares, since some may own nothing of a group.
            device: device of the results; required if there are no gradients.
            backend: ``auto`` for kernels where supported, ``reference`` for plain torch.

        Raises:
            LayoutError: gradients that are not flat, of another dtype, on several devices, or in a
                group out of range.
        """
        if gradients and device is None:
            device = gradients[0].values.device
        home = torch.empty(0, dtype=torch.uint8, device=device).device  # with its index
        named = max((one.group for one in gradients), default=0) + 1
        groups = named if num_groups is None else num_groups
        for index, one in enumerate(gradients):
            where = f"norm table: gradients[{index}]"
            require_flat(where, one.values, one.values.numel(), list(NORM), home)
            if not 0 <= one.group < groups:
                raise LayoutError(
                    f"{where}: expected a group from 0 to {groups - 1}, got {one.group}. Give the "
                    "table a larger num_groups, or the gradients another group."
                )
        owned = [one for one in gradients if one.values.numel()]
        squares = torch.zeros(groups, dtype=torch.float64, device=home)
        zeros = torch.zeros(1, dtype=torch.int64, device=home)
        calls: tuple[Call, ...] = (partial(_sum, owned, squares, zeros, count_zeros=count_zeros),)
        if takes_kernels(backend, home, e4m3=False):
            calls = tuple(_bind(owned, squares, zeros, count_zeros=count_zeros))
        return cls(
            device=home,
            calls=calls,
            places=Places.of_each_memory(one.values for one in owned),
            gradients=tuple(gradients),
            squares=squares,
            zeros=zeros,
            counts_zeros=count_zeros,
        )


def _sum(
    gradients: Sequence[NormInput], squares: Tensor, zeros: Tensor, *, count_zeros: bool
) -> None:
    squares.zero_()
    zeros.zero_()
    for one in gradients:
        squares[one.group] += sum_squares(one.values)
        if count_zeros:
            zeros.add_(count_zeros_of(one.values))


def _bind(
    owned: Sequence[NormInput], squares: Tensor, zeros: Tensor, *, count_zeros: bool
) -> Iterator[BoundKernel]:
    from moe_optim.kernels.norm_kernel import add_sums_kernel, sum_squares_kernel

    parts, bounds = _cut_parts(owned, len(squares))
    slots = sum(map(len, parts.values()))
    sums = torch.zeros(slots, dtype=torch.float64, device=squares.device)
    num_zeros = slots if count_zeros else 0
    zero_sums = torch.zeros(num_zeros, dtype=torch.int32, device=squares.device)
    for dtype, rows in parts.items():
        yield BoundKernel(
            sum_squares_kernel,
            len(rows),
            rows.to(squares.device),
            sums,
            zero_sums,
            FROM_FP32=dtype == torch.float32,
            COUNT_ZEROS=count_zeros,
            TILE=NORM[dtype].numel,
            num_warps=NORM[dtype].num_warps,
        )
    yield BoundKernel(
        add_sums_kernel,
        len(squares),
        bounds.to(squares.device),
        sums,
        zero_sums,
        squares,
        zeros,
        COUNT_ZEROS=count_zeros,
        LANES=NORM_LANES,
        num_warps=4,
    )


def _cut_parts(
    owned: Sequence[NormInput], num_groups: int
) -> tuple[dict[torch.dtype, Tensor], Tensor]:
    """Return parts by dtype, starting at cache lines and ordered by group, and bounds of groups."""
    ordered = sorted(owned, key=lambda one: one.group)  # stable
    tiles = [NORM[one.values.dtype] for one in ordered]
    address = int64([one.values.data_ptr() for one in ordered])
    size = int64([one.values.element_size() for one in ordered])
    length = int64([tile.numel * tile.num_tiles for tile in tiles])
    begin = address % _LINE // size
    end = begin + int64([one.values.numel() for one in ordered])
    which, numbers, _ = cut_ranges(end, length)

    first = numbers * length[which]
    lines = (address // _LINE * _LINE)[which] + first * size[which]
    begins = (begin[which] - first).clamp(min=0)
    ends = torch.minimum(end[which] - first, length[which])
    parts = torch.stack([lines, begins, ends, torch.arange(len(which), device="cpu")], 1)

    of_dtype = {dtype: size[which] == dtype.itemsize for dtype in NORM}
    groups = int64([one.group for one in ordered])[which]
    bounds = torch.searchsorted(groups, torch.arange(num_groups + 1, device="cpu"))
    return {dtype: parts[rows] for dtype, rows in of_dtype.items() if rows.any()}, bounds
