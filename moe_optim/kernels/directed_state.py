"""Tensors of one parameter shard that a step along a direction reads and writes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats.reference.muon import apply_into
from moe_optim.kernels.adam_state import Rule
from moe_optim.kernels.plan import require_flat

_WEIGHTS = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DirectedState:
    """Whole matrices of one parameter whose masters move along a direction."""

    parameter: str
    """Parameter name, for errors."""
    master: Tensor
    """Master weights, [n] fp32."""
    group: int = 0
    """Row of the hyper-parameters."""
    norm: int = 0
    """Index of the clip factor."""
    weight: Tensor | None = None
    """Copy of the new masters, [n] fp32 or bf16, or None."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that a step writes: [n] each, fp32 or bf16."""
        return (self.master,) if self.weight is None else (self.master, self.weight)

    def check(self) -> None:
        """Raise LayoutError unless all tensors have one size, one device and supported dtypes."""
        numel, device = self.master.numel(), self.master.device
        require_flat(f"{self.parameter}: master", self.master, numel, (torch.float32,), device)
        if self.weight is not None:
            require_flat(f"{self.parameter}: weight", self.weight, numel, _WEIGHTS, device)
        for one in self.tensors():
            if one.numel() and not one.untyped_storage().size():
                raise LayoutError(
                    f"{self.parameter}: expected a master and a weight in memory, got an offloaded "
                    "one. Bring back what is offloaded before a step is planned."
                )

    def piece(self, first: int, last: int, direction: Tensor) -> "DirectedPiece":
        """Return elements ``first`` to ``last``, with their direction.

        Args:
            first: first element, counted in the shard.
            last: end element (exclusive).
            direction: direction, [last - first] bf16, fp16 or fp32, contiguous.
        """
        return DirectedPiece(
            parameter=self.parameter,
            master=self.master[first:last],
            group=self.group,
            norm=self.norm,
            weight=None if self.weight is None else self.weight[first:last],
            direction=direction,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DirectedPiece(DirectedState):
    """Range of a state, with the direction of its step."""

    direction: Tensor
    """Direction, [n] bf16, fp16 or fp32."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Direction, [n] bf16, fp16 or fp32."""
        return (self.direction,)

    def update(self, rule: Rule, hyper: Tensor, clip: Tensor) -> None:
        """Step along the direction in plain torch.

        Args:
            rule: ``direction``.
            hyper: row of hyper-parameters, [HYPER_FIELDS] fp32.
            clip: clip factor, fp32 scalar. A negative factor skips the step.
        """
        # .data: as with kernels, version counters count only other writes
        apply_into(self.master.data, self.direction, hyper=hyper[:6], clip=clip)
