"""Parameter of a table: the values that this rank owns, and the buffers to write."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import Direction, QuantizedWeight, round_up
from moe_optim.formats.reference import (
    derive_into,
    expand_scale_into,
    quantize_gathered_into,
    ranges,
)
from moe_optim.kernels.exchange import AMAX_SLOTS, Exchange

_NO_SCALES: Mapping[Direction, Tensor] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableEntry:
    """Parameter: its new values, or this rank's range of them, and the buffers to write."""

    parameter: str
    """Parameter name, for errors."""
    source: Tensor
    """New values, fp32 or bf16, contiguous, row-major: all of them, [E, R, C] or flat, or this
    rank's range in any shape; may be empty. The caller may replace its memory."""
    target: QuantizedWeight
    """Buffers of the whole parameter; only bytes that depend on the source are written."""
    start: int = 0
    """First element of the source, counted in the parameter."""
    cuts: tuple[int, ...] = ()
    """Elements inside the parameter at which the ranges of two ranks meet, the same on all ranks.
    The blocks and experts around them need maxima of several ranks."""
    shares_experts: bool = False
    """Whether experts continue in parameters of other ranks, in other rows or columns, so that
    ranks share a global amax."""
    storage_scales: Mapping[Direction, Tensor] = field(default=_NO_SCALES)
    """Scales as Transformer Engine stores them, [E, ...] of ``storage_scale_shape``, expanded from
    the target's scales after a gather. Padding is not written."""

    @property
    def end(self) -> int:
        """End element of the source (exclusive), counted in the parameter."""
        return self.start + self.source.numel()

    @property
    def owned_experts(self) -> range:
        """Experts that the source contains at least one element of."""
        _, rows, cols = self.target.shape
        if self.start == self.end:
            return range(0)
        return range(self.start // (rows * cols), -(-self.end // (rows * cols)))

    def owned_parts(self) -> "Iterator[OwnedPart]":
        """Yield the owned part of each owned expert."""
        return map(self.owned_part, self.owned_experts)

    def owned_part(self, expert: int) -> "OwnedPart":
        """Return the owned part of ``expert``, one of ``owned_experts``."""
        _, rows, cols = self.target.shape
        block_row, numel = self.target.format.block_row_height * cols, rows * cols
        base = expert * numel
        low, high = max(0, self.start - base), min(numel, self.end - base)
        first = min(high, round_up(low, block_row))
        end = high if high == numel else high // block_row * block_row
        return OwnedPart(
            base=base, low=low, high=high, first_whole=first, end_whole=max(first, end)
        )

    def check(self) -> None:
        """Raise LayoutError unless source, target and range are consistent."""
        source, target = self.source, self.target
        experts, rows, cols = target.shape
        whole = source.numel() == experts * rows * cols
        if whole and not self.cuts and source.dim() != 1 and tuple(source.shape) != target.shape:
            raise LayoutError(
                f"{self.parameter}: expected a source of shape {list(target.shape)}, got "
                f"{list(source.shape)}. View the parameter's range as its logical shape, or flat."
            )
        if self.start < 0 or self.end > experts * rows * cols:
            raise LayoutError(
                f"{self.parameter}: expected a source of shape {list(target.shape)} or a range of "
                f"its elements, got {list(source.shape)} from element {self.start} on."
            )
        if source.dtype not in (torch.float32, torch.bfloat16) or not source.is_contiguous():
            raise LayoutError(
                f"{self.parameter}: expected a contiguous fp32 or bf16 source, got {source.dtype} "
                f"with strides {list(source.stride())}. Call .float() or .contiguous() first."
            )
        if source.device != target.rowwise_data.device:
            raise LayoutError(
                f"{self.parameter}: expected source and storage on one device, got "
                f"{source.device} and {target.rowwise_data.device}. If masters were offloaded, "
                "move them back before weights are gathered."
            )
        self._check_ends()
        self._check_storage_scales()

    def _check_ends(self) -> None:
        if not self.source.numel():
            return
        experts, rows, cols = self.target.shape
        ends = {0, *self.cuts, experts * rows * cols}
        inside = [cut for cut in self.cuts if self.start < cut < self.end]
        if inside or not {self.start, self.end} <= ends:
            raise LayoutError(
                f"{self.parameter}: expected a range from one cut to the next, got elements "
                f"{self.start} to {self.end} between cuts at {sorted(self.cuts)}. Give the places "
                "where the shards of all ranks meet."
            )

    def _check_storage_scales(self) -> None:
        format = self.target.format
        experts, rows, cols = self.target.shape
        for direction, scale in self.storage_scales.items():
            shape = (experts, *format.storage_scale_shape(rows, cols, direction))
            if tuple(scale.shape) != shape or scale.dtype != format.scale_dtype:
                raise LayoutError(
                    f"{self.parameter}: expected {direction} scales in storage as {list(shape)} "
                    f"{format.scale_dtype}, got {list(scale.shape)} {scale.dtype}."
                )


# Plain torch


def find_maxima(entry: TableEntry, shared: Exchange, exchange: Tensor) -> None:
    """Write this rank's share of the maxima of a parameter that several ranks share."""
    if entry.source.numel():
        ranges.partial_amax_into(
            entry.source,
            entry.start,
            entry.target,
            exchange,
            block_rows=shared.block_rows,
            experts=shared.experts,
        )


def encode(entry: TableEntry, shared: Exchange, exchange: Tensor) -> None:
    """Write the gathered buffers of a parameter, given the maxima of all ranks."""
    shape = entry.target.shape
    if entry.source.numel() == prod(shape) and not entry.cuts and not entry.shares_experts:
        values = entry.source.view(shape)
        quantize_gathered_into(values, entry.target.format, entry.target, name=entry.parameter)
    elif entry.source.numel():
        ranges.encode_into(
            entry.source,
            entry.start,
            entry.target,
            exchange,
            block_rows=shared.block_rows,
            experts={e: (slot, slot + AMAX_SLOTS) for e, slot in shared.experts.items()},
        )


def derive(entry: TableEntry) -> None:
    """Write the buffers of a parameter that are derived after a gather."""
    derive_into(entry.target)
    for direction, scale in entry.storage_scales.items():
        expand_scale_into(entry.target, direction, scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedPart:
    """Owned elements of one expert, counted from its first."""

    base: int
    """First element of the expert, counted in the parameter."""
    low: int
    """First owned element."""
    high: int
    """End of the owned elements (exclusive)."""
    first_whole: int
    """First element of the first entirely owned block row, or ``high``."""
    end_whole: int
    """End of the entirely owned block rows (exclusive), at least ``first_whole``."""
