"""One parameter of a table: the values this rank owns of it, and the buffers that take them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import Direction, QuantizedWeight, round_up

_NO_SCALES: Mapping[Direction, Tensor] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableEntry:
    """One parameter: its new values, or this rank's range of them, and the buffers to write."""

    parameter: str
    """Name, for errors."""
    source: Tensor
    """fp32 or bf16, contiguous, in row-major order: all values, [E, R, C] or flat, or this rank's
    range of them in any shape, perhaps empty. The caller may exchange its memory."""
    target: QuantizedWeight
    """Buffers of the whole parameter; only what follows from the source is overwritten."""
    start: int = 0
    """First element of the source, counted in the parameter."""
    cuts: tuple[int, ...] = ()
    """Elements inside of the parameter at which the ranges of any two ranks meet, the same on all
    ranks. Blocks and experts around them need maxima of several ranks."""
    shares_experts: bool = False
    """Whether its experts continue in parameters of other ranks, which have other rows or columns
    of them, so that their amaxes, where the format has them, are shared."""
    storage_scales: Mapping[Direction, Tensor] = field(default=_NO_SCALES)
    """Scales as Transformer Engine stores them, [E, ...] of ``storage_scale_shape``: filled from
    the target's scales after a gather. Their padding is not touched."""

    @property
    def end(self) -> int:
        """One past the last element of the source, counted in the parameter."""
        return self.start + self.source.numel()

    @property
    def is_whole(self) -> bool:
        """Whether the source holds every value that the parameter's bytes follow from."""
        experts, rows, cols = self.target.shape
        is_all = self.source.numel() == experts * rows * cols
        return is_all and not self.cuts and not self.shares_experts

    @property
    def owned_experts(self) -> range:
        """The experts of which the source has at least one element."""
        _, rows, cols = self.target.shape
        if self.start == self.end:
            return range(0)
        return range(self.start // (rows * cols), -(-self.end // (rows * cols)))

    def owned_parts(self) -> "Iterator[OwnedPart]":
        """Yield the owned part of each of these experts."""
        return map(self.owned_part, self.owned_experts)

    def owned_part(self, expert: int) -> "OwnedPart":
        """Return the owned part of an expert.

        Args:
            expert: one of ``owned_experts``.
        """
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
        """Check that source, target and ranges fit each other.

        Raises:
            LayoutError: they do not; the message names the parameter.
        """
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedPart:
    """The owned elements of one expert, counted from its first."""

    base: int
    """First element of the expert, counted in the parameter."""
    low: int
    """First owned element."""
    high: int
    """One past the last."""
    first_whole: int
    """First element of the first block row that is owned as a whole, or ``high``."""
    end_whole: int
    """One past the last of such block rows, not below ``first_whole``."""
