"""Masters of one parameter shard, with the tensors that their update reads and writes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats.reference.adam import step_into
from moe_optim.formats.reference.muon import apply_into

Rule = Literal["adamw", "adam", "direction"]
"""Rule: Adam with decoupled or coupled weight decay, or a step along a given direction."""

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MasterState:
    """Masters of one parameter shard, without the tensors that their update reads."""

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

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that an update reads besides the masters, [n] each; none by default."""
        return ()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that a step reads or writes, not copies: [n] each, fp32 or bf16."""
        held = (self.master, *self.inputs)
        return held if self.weight is None else (*held, self.weight)

    def update(self, rule: Rule, hyper: Tensor, clip: Tensor) -> None:
        """Step the shard in plain torch.

        Args:
            rule: rule of the update.
            hyper: row of hyper-parameters, [HYPER_FIELDS] fp32.
            clip: clip factor, fp32 scalar. A negative factor skips the update.
        """
        raise NotImplementedError

    def along(self, first: int, last: int, direction: Tensor) -> "DirectedState":
        """Return elements ``first`` to ``last``, with their direction.

        Args:
            first: first element, counted in the shard.
            last: end element (exclusive).
            direction: direction, [last - first] bf16, fp16 or fp32, contiguous.
        """
        return DirectedState(
            parameter=self.parameter,
            master=self.master[first:last],
            group=self.group,
            norm=self.norm,
            weight=None if self.weight is None else self.weight[first:last],
            direction=direction,
        )

    def check(self) -> None:
        """Raise LayoutError unless all tensors have one size, one device and supported dtypes."""
        held = self.tensors()
        numels = {one.numel() for one in held}
        places = {one.device for one in held}
        known = self.master.dtype == torch.float32 and all(one.dtype in _DTYPES for one in held)
        same = len({one.dtype for one in self.inputs[1:]}) < 2
        # an empty shard has no memory
        flat = all(
            one.is_contiguous() and (one.untyped_storage().size() or not one.numel())
            for one in held
        )
        if len(numels) > 1 or len(places) > 1 or not (known and same and flat):
            spelt = ", ".join(f"{one.dtype} {list(one.shape)} on {one.device}" for one in held)
            raise LayoutError(
                f"{self.parameter}: expected an fp32 master, and any gradient, moments of one "
                "dtype and weight in fp32 or bf16, all contiguous, of one size and on one device, "
                f"got {spelt}. Bring back what is offloaded, or set step: stock."
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdamState(MasterState):
    """Tensors of one parameter shard that an Adam step reads and writes."""

    gradient: Tensor
    """Reduced gradient, [n] fp32 or bf16."""
    exp_avg: Tensor
    """First moment, [n] fp32 or bf16."""
    exp_avg_sq: Tensor
    """Second moment, [n], in the dtype of the first."""
    on_host: tuple[Tensor, Tensor, Tensor] | None = None
    """CPU views of master and moments over the same memory, if they are offloaded to the host."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Gradient and both moments, [n] each, fp32 or bf16."""
        return self.gradient, self.exp_avg, self.exp_avg_sq

    def update(self, rule: Rule, hyper: Tensor, clip: Tensor) -> None:
        """Step by ``adamw`` or ``adam``; arguments are those of :meth:`MasterState.update`."""
        master = self.master.data  # as with kernels, version counters count only other writes
        held = (master, self.gradient, self.exp_avg, self.exp_avg_sq)
        step_into(*held, hyper=hyper, clip=clip, decoupled=rule == "adamw")

    def piece(self, first: int, last: int, there: Sequence[Tensor]) -> "AdamState":
        """Return elements ``first`` to ``last``, with master and moments elsewhere.

        Args:
            first: first element, counted in the shard.
            last: end element (exclusive).
            there: master and both moments of these elements, [last - first] each, in their dtypes.
        """
        here = slice(first, last)
        return replace(
            self,
            master=there[0],
            gradient=self.gradient[here],
            exp_avg=there[1],
            exp_avg_sq=there[2],
            weight=None if self.weight is None else self.weight[here],
            on_host=None,
        )

    @property
    def element_bytes(self) -> int:
        """Bytes per element in master and moments together."""
        held = (self.master, self.exp_avg, self.exp_avg_sq)
        return sum(one.element_size() for one in held)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DirectedState(MasterState):
    """Masters, and the direction along which a step moves them."""

    direction: Tensor
    """Direction, [n] bf16, fp16 or fp32."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Direction, [n] bf16, fp16 or fp32."""
        return (self.direction,)

    def update(self, rule: Rule, hyper: Tensor, clip: Tensor) -> None:  # noqa: ARG002
        """Step along the direction; arguments are those of :meth:`MasterState.update`."""
        # .data: as with kernels, version counters count only other writes
        apply_into(self.master.data, self.direction, hyper=hyper[:6], clip=clip)
