"""The memory of one managed bucket, which always knows what it holds.

Quantized weights have no place in a bf16 parameter buffer. With wire ``bf16`` the gather borrows
the bucket's own gradient memory: masters are staged there, gathered, requantized and wiped. Weights
and gradients thus share bytes, never across buckets, and every hazard of that sharing is one
transition of the table below that does not exist.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from moe_optim.errors import StateError


class Content(Enum):
    """What the gradient memory of a bucket holds."""

    ZERO = "zeros"
    PARTIAL = "gradients that are still accumulating"
    REDUCED = "reduced gradients"
    SPENT = "gradients a step has already used"
    STAGED = "masters staged for the parameter gather"
    IN_FLIGHT = "parameters in flight"


class Event(Enum):
    """What can happen to it."""

    ZERO = "zero_grad_buffer"
    ACCUMULATE = "a backward pass"
    REDUCE = "the gradient reduction"
    READ = "the optimizer reading its gradients"
    SPEND = "the optimizer step"
    STAGE = "the parameter gather"
    FLY = "the dispatch of the parameter gather"
    LAND = "the end of the parameter gather"


_Z, _P, _R, _S = Content.ZERO, Content.PARTIAL, Content.REDUCED, Content.SPENT

TRANSITIONS: dict[Event, tuple[frozenset[Content], Content | None]] = {
    Event.ZERO: (frozenset({_Z, _P, _R, _S}), _Z),
    Event.ACCUMULATE: (frozenset({_Z, _P}), _P),
    Event.REDUCE: (frozenset({_Z, _P}), _R),
    Event.READ: (frozenset({_Z, _R}), None),
    Event.SPEND: (frozenset({_Z, _R, _S}), _S),
    Event.STAGE: (frozenset({_Z, _S}), Content.STAGED),
    Event.FLY: (frozenset({Content.STAGED}), Content.IN_FLIGHT),
    Event.LAND: (frozenset({Content.STAGED, Content.IN_FLIGHT}), _Z),
}
"""Event -> the contents it accepts, and the content it leaves (None: unchanged)."""

REMEDIES: dict[Event, str] = {
    Event.ZERO: "Let the parameter gather finish before the gradients are zeroed.",
    Event.ACCUMULATE: "Call zero_grad_buffer() before the first backward pass of a step.",
    Event.REDUCE: "Reduce once a step, after the last backward pass.",
    Event.READ: "Call finish_grad_sync() on the DDP module before optimizer.step().",
    Event.SPEND: "Call finish_grad_sync() on the DDP module before optimizer.step().",
    Event.STAGE: (
        "Step or drop these gradients (zero_grad_buffer()) before weights are gathered from the "
        "masters: they would be overwritten."
    ),
    Event.FLY: "Only start_param_sync() may dispatch a gather.",
    Event.LAND: "Only start_param_sync() may dispatch a gather.",
}


class BucketStorage:
    """Gradients of one bucket between backward and step, bf16 parameters during a gather.

    Args:
        name: how errors call the bucket.
        grads: flat gradient memory of the bucket, bf16 or fp32; the view is kept.

    Attributes:
        staging: flat bf16 view of the first bytes of ``grads``, one entry a gradient.
        content: what the memory holds now.
        before_zero: called before zeroing, so that the owner can finish a gather first.
    """

    def __init__(self, name: str, grads: Tensor) -> None:
        self.name = name
        self.grads = grads
        self.staging = grads.view(torch.bfloat16)[: grads.numel()]
        self._rest = grads.view(torch.uint8)[self.staging.numel() * self.staging.itemsize :]
        self.content = Content.ZERO
        self.before_zero: Callable[[], None] = lambda: None

    def record(self, event: Event) -> None:
        """Check that ``event`` may happen now, and note what it leaves.

        Raises:
            StateError: naming the bucket, its content, the event and what to do.
        """
        accepted, left = TRANSITIONS[event]
        if self.content not in accepted:
            expected = " or ".join(content.value for content in Content if content in accepted)
            raise StateError(
                f"{self.name}: {event.value}: expected {expected}, got {self.content.value}. "
                f"{REMEDIES[event]}"
            )
        if left is not None:
            self.content = left

    def zero(self) -> None:
        """Make all gradients zero; memory that is zero already is not touched."""
        self.before_zero()
        was_zero = self.content is Content.ZERO
        self.record(Event.ZERO)
        if not was_zero:
            self.grads.zero_()

    def open_for_staging(self) -> None:
        """Give the memory to the parameter gather, with zeros wherever the gather does not write.

        Raises:
            StateError: it holds gradients that no step has used, or is offloaded.
        """
        if self.grads.untyped_storage().size() == 0:
            raise StateError(
                f"{self.name}: the parameter gather: expected gradient memory, got none: it is "
                "offloaded. Call restore_grad_buffers() first, or gather before offloading."
            )
        spent = self.content is Content.SPENT
        self.record(Event.STAGE)
        if spent:
            self._rest.zero_()
