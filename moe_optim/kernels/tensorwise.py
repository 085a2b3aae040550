"""Per-tensor FP8 (current scaling): cast from masters to E4M3 codes, with one scale per weight."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_optim.formats.reference import tensorwise as reference
from moe_optim.formats.reference.blocks import expert_amax_into
from moe_optim.kernels.cutting import cut_ranges, int64
from moe_optim.kernels.plan import (
    ALIGNMENT,
    Backend,
    BoundKernel,
    Call,
    Plan,
    require_flat,
    takes_kernels,
)
from moe_optim.kernels.tuning import TENSORWISE_LANES, TENSORWISE_PART, TENSORWISE_TILE
from moe_optim.places import Places, addresses_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScaledWeight:
    """Tensorwise weight, or the owned part of it."""

    master: Tensor
    """Optimizer's master, [n] fp32, contiguous; may be empty."""
    data: Tensor
    """E4M3 codes of these elements, [n] uint8, contiguous."""
    scale_inv: Tensor
    """Dequantization factor of the whole weight, [1] fp32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorwiseTable(Plan):
    """Plan that casts masters to codes in place. See :meth:`build`.

    Every rank launches ``find_amaxes``, all-reduces ``amaxes`` with MAX, and launches the table,
    which writes the scale of every weight and the codes that this rank owns.
    """

    weights: tuple[ScaledWeight, ...]
    """All weights, in the same order on every rank."""
    find_amaxes: Plan
    """Plan that writes ``amaxes``; NaN counts as zero."""
    amaxes: Tensor
    """Amax of the owned parts, [num_weights] fp32, or, once reduced, of whole weights."""
    scales: Tensor
    """Encode scales, [num_weights] fp32, written with the codes."""

    @classmethod
    def build(
        cls, weights: Sequence[ScaledWeight], *, backend: Backend = "auto"
    ) -> "TensorwiseTable":
        """Plan the cast of at least one weight, all on one device, without copying.

        Every rank passes the same weights in the same order.
        """
        device = weights[0].scale_inv.device
        for index, one in enumerate(weights):
            where, numel = f"tensorwise table: weights[{index}]", one.master.numel()
            require_flat(f"{where}: master", one.master, numel, [torch.float32], device)
            require_flat(f"{where}: data", one.data, numel, [torch.uint8], device)
            require_flat(f"{where}: scale_inv", one.scale_inv, 1, [torch.float32], device)
        amaxes = torch.zeros(len(weights), dtype=torch.float32, device=device)
        scales = torch.ones(len(weights), dtype=torch.float32, device=device)
        finding: tuple[Call, ...] = (partial(_find_amaxes, weights, amaxes),)
        casting: tuple[Call, ...] = (partial(_cast, weights, amaxes, scales),)
        if takes_kernels(backend, device):
            parts, bounds = _cut_parts(weights)
            parts = {aligned: rows.to(device) for aligned, rows in parts.items()}
            finding = tuple(_bind_finding(parts, bounds.to(device), amaxes))
            casting = tuple(_bind_casting(parts, weights, amaxes, scales))
        places = Places(one.master for one in weights)
        return cls(
            device=device,
            calls=casting,
            places=places,
            weights=tuple(weights),
            find_amaxes=Plan(device=device, calls=finding, places=places),
            amaxes=amaxes,
            scales=scales,
        )


def _find_amaxes(weights: Sequence[ScaledWeight], amaxes: Tensor) -> None:
    amaxes.zero_()
    for amax, one in zip(torch.split(amaxes, 1), weights, strict=True):
        expert_amax_into(amax, one.master, 0, one.master.numel())


def _cast(weights: Sequence[ScaledWeight], amaxes: Tensor, scales: Tensor) -> None:
    scales.copy_(reference.encode_scale(amaxes))
    for scale, one in zip(torch.split(scales, 1), weights, strict=True):
        one.scale_inv.copy_(scale.reciprocal())
        reference.cast_into(one.data, one.master, scale)


def _bind_finding(
    parts: Mapping[bool, Tensor], bounds: Tensor, amaxes: Tensor
) -> Iterator[BoundKernel]:
    from moe_optim.kernels.tensorwise_kernel import part_amax_kernel, weight_amax_kernel

    num_slots = sum(map(len, parts.values()))
    slots = torch.zeros(num_slots, dtype=torch.float32, device=amaxes.device)
    yield from _bind_parts(part_amax_kernel, parts, slots)
    yield BoundKernel(
        weight_amax_kernel, len(amaxes), bounds, slots, amaxes, LANES=TENSORWISE_LANES, num_warps=1
    )


def _bind_casting(
    parts: Mapping[bool, Tensor], weights: Sequence[ScaledWeight], amaxes: Tensor, scales: Tensor
) -> Iterator[BoundKernel]:
    from moe_optim.kernels.tensorwise_kernel import cast_kernel, scale_kernel

    inverses = int64(addresses_of(one.scale_inv for one in weights)).to(amaxes.device)
    yield BoundKernel(scale_kernel, len(weights), amaxes, scales, inverses, num_warps=1)
    yield from _bind_parts(cast_kernel, parts, scales)


def _bind_parts(kernel: Any, parts: Mapping[bool, Tensor], values: Tensor) -> Iterator[BoundKernel]:
    for aligned, rows in parts.items():
        yield BoundKernel(
            kernel,
            len(rows),
            rows,
            values,
            ALIGNED=aligned,
            TILE=TENSORWISE_TILE.numel,
            num_warps=TENSORWISE_TILE.num_warps,
        )


def _cut_parts(weights: Sequence[ScaledWeight]) -> tuple[dict[bool, Tensor], Tensor]:
    """Return the parts by alignment of master and codes, and the bounds of the weights."""
    masters = int64(addresses_of(one.master for one in weights))
    codes = int64(addresses_of(one.data for one in weights))
    numels = int64([one.master.numel() for one in weights])
    which, numbers, bounds = cut_ranges(numels, TENSORWISE_PART)

    first = numbers * TENSORWISE_PART
    lengths = (numels[which] - first).clamp(max=TENSORWISE_PART)
    slots = torch.arange(len(which), device="cpu")
    parts = torch.stack(
        [masters[which] + 4 * first, codes[which] + first, lengths, which, slots], 1
    )
    aligned = (masters | codes)[which] % ALIGNMENT == 0
    return {key: parts[aligned == key] for key in (True, False) if (aligned == key).any()}, bounds
