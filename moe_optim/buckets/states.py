"""State machine of a managed bucket: contents of gradients and weights, and a table of events.

With gather dtype ``bf16`` the gather borrows the gradient memory: masters are staged there,
gathered, requantized and zeroed. Transitions missing from the table are the hazards of sharing this
memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from moe_optim.errors import StateError
from moe_optim.weights.storage import Weights as Weights
from moe_optim.weights.storage import WeightState


class Gradients(Enum):
    """Contents of a bucket's gradient memory."""

    ZERO = "zeros"
    PARTIAL = "gradients that are still accumulating"
    REDUCED = "reduced gradients"
    SPENT = "gradients a step has already used"
    IN_FLIGHT = "parameters in flight"


@dataclass(frozen=True, slots=True)
class BucketContents:
    """Contents of a bucket."""

    gradients: Gradients
    weights: Weights


class Event(Enum):
    """Events of a bucket."""

    ZERO = "zero_grad_buffer"
    ACCUMULATE = "a backward pass"
    REDUCE = "the gradient reduction"
    READ = "the optimizer reading its gradients"
    STEP = "the optimizer step"
    SETTLE = "new masters"
    ENCODE = "new masters, encoded with their step"
    GATHER = "the parameter gather"
    FINISH = "the end of the parameter gather"
    FAIL = "a parameter gather that failed"
    OFFLOAD = "offload_to_cpu"
    RELOAD = "reload_from_cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """Effect of an event on each state that it accepts; other states refuse it.

    The default accepts every state and leaves it unchanged.
    """

    gradients: Mapping[Gradients, Gradients] = MappingProxyType({one: one for one in Gradients})
    weights: Mapping[Weights, Weights] = MappingProxyType({one: one for one in Weights})
    gradients_remedy: str = ""
    """Remedy if the gradients refuse the event."""
    weights_remedy: str = ""
    """Remedy if the weights refuse the event."""


_Z, _P, _R, _S = Gradients.ZERO, Gradients.PARTIAL, Gradients.REDUCED, Gradients.SPENT
_FRESH, _STALE, _MOVING = Weights.FRESH, Weights.STALE, Weights.MOVING
_ENCODED = Weights.ENCODED
_REDUCE_FIRST = "Call finish_grad_sync() on the DDP module before optimizer.step()."
_ONLY_GROUPS = "Only start_param_sync() on the DDP module may gather weights."
_REPLAY = "the replay of a CUDA graph"
_CAPTURE_AGAIN = (
    "A replay does what its capture did, whatever has happened since. Bring weights and gradients "
    "to where they were then, or drop the graph (reset_cuda_graph()) and capture it again."
)
_RELOAD_FIRST = "Call reload_from_cpu() on the buffers of the DDP module first."

OWN_MEMORY: Mapping[Event, Transition] = {
    Event.ZERO: Transition(
        gradients={_Z: _Z, _P: _Z, _R: _Z, _S: _Z},
        gradients_remedy="Let the parameter gather finish before the gradients are zeroed.",
    ),
    Event.ACCUMULATE: Transition(
        gradients={_Z: _P, _P: _P},
        gradients_remedy="Call zero_grad_buffer() before the first backward pass of a step.",
    ),
    Event.REDUCE: Transition(
        gradients={_Z: _R, _P: _R},
        gradients_remedy="Reduce once a step, after the last backward pass.",
    ),
    Event.READ: Transition(
        gradients={_Z: _Z, _R: _R},
        gradients_remedy=_REDUCE_FIRST,
    ),
    Event.STEP: Transition(
        gradients={_Z: _S, _R: _S, _S: _S},
        gradients_remedy=_REDUCE_FIRST,
        weights={_FRESH: _MOVING, _STALE: _MOVING, _ENCODED: _MOVING},
        weights_remedy=_RELOAD_FIRST,
    ),
    Event.SETTLE: Transition(
        weights={_FRESH: _STALE, _STALE: _STALE, _MOVING: _STALE, _ENCODED: _STALE},
        weights_remedy=_RELOAD_FIRST,
    ),
    Event.ENCODE: Transition(
        weights={_MOVING: _ENCODED},
        weights_remedy="Only optimizer.step() encodes weights.",
    ),
    Event.GATHER: Transition(
        weights={_STALE: Weights.IN_FLIGHT, _ENCODED: Weights.IN_FLIGHT},
        weights_remedy=f"Read weights after optimizer.step(). {_RELOAD_FIRST}",
    ),
    Event.FINISH: Transition(
        weights={Weights.IN_FLIGHT: _FRESH},
        weights_remedy=_ONLY_GROUPS,
    ),
    Event.FAIL: Transition(
        weights={Weights.IN_FLIGHT: _STALE},
        weights_remedy=_ONLY_GROUPS,
    ),
    Event.OFFLOAD: Transition(
        weights={
            _FRESH: Weights.OFFLOADED,
            _STALE: Weights.STALE_OFFLOADED,
            _ENCODED: Weights.STALE_OFFLOADED,
        },
        weights_remedy="Offload between two steps.",
    ),
    Event.RELOAD: Transition(
        weights={Weights.OFFLOADED: _FRESH, Weights.STALE_OFFLOADED: _STALE},
        weights_remedy="Call offload_to_cpu() first.",
    ),
}
"""Transitions of a bucket whose gather has separate memory."""

SHARED_MEMORY: Mapping[Event, Transition] = {
    **OWN_MEMORY,
    Event.GATHER: replace(
        OWN_MEMORY[Event.GATHER],
        gradients={_Z: Gradients.IN_FLIGHT, _S: Gradients.IN_FLIGHT},
        gradients_remedy="Step or drop these gradients (zero_grad_buffer()) before weights are "
        "gathered from the masters: they would be overwritten.",
    ),
    Event.FINISH: replace(
        OWN_MEMORY[Event.FINISH],
        gradients={Gradients.IN_FLIGHT: _Z},
        gradients_remedy=_ONLY_GROUPS,
    ),
    Event.FAIL: replace(
        OWN_MEMORY[Event.FAIL],
        gradients={Gradients.IN_FLIGHT: _S},
        gradients_remedy=_ONLY_GROUPS,
    ),
}
"""Transitions of a bucket whose gather uses its gradient memory."""


class BucketState(WeightState):
    """State of one bucket, changed only by the events of a table.

    Attributes:
        gradients: contents of the gradient memory; read-only.
        weights: state of the weights; read-only.
    """

    def __init__(self, name: str, table: Mapping[Event, Transition]) -> None:
        super().__init__()
        self.name = name
        self._table = table
        self.gradients = Gradients.ZERO

    @property
    def contents(self) -> BucketContents:
        """Gradients and weights."""
        return BucketContents(self.gradients, self.weights)

    def record(self, event: Event) -> None:
        """Check that ``event`` is accepted, and apply it.

        Raises:
            StateError: the event is refused; names the bucket, its state, the event and a remedy.
        """
        row = self._table[event]
        gradients = row.gradients.get(self.gradients)
        weights = row.weights.get(self.weights)
        if gradients is None:
            raise self._refusal(event.value, self.gradients, row.gradients, row.gradients_remedy)
        if weights is None:
            raise self._refusal(event.value, self.weights, row.weights, row.weights_remedy)
        self.gradients, self.weights = gradients, weights

    def require_replayable(self, begins_with: BucketContents, leaves: BucketContents) -> None:
        """Raise StateError unless kernels captured between two states do the same now.

        Gradients that the capture did not change may be in any state. Weights that it gathered may
        be FRESH or ENCODED: the same masters give the same bytes.
        """
        gradients = begins_with.gradients
        if gradients is not leaves.gradients and gradients is not self.gradients:
            raise self._refusal(_REPLAY, self.gradients, [gradients], _CAPTURE_AGAIN)
        accepted = [begins_with.weights]
        if begins_with.weights is Weights.STALE and leaves.weights is Weights.FRESH:
            accepted += [Weights.FRESH, Weights.ENCODED]
        if self.weights not in accepted:
            raise self._refusal(_REPLAY, self.weights, accepted, _CAPTURE_AGAIN)

    def replay(self, begins_with: BucketContents, leaves: BucketContents) -> None:
        """Set the state left by a replay of kernels captured between two states."""
        if begins_with.gradients is not leaves.gradients:
            self.gradients = leaves.gradients
        self.weights = leaves.weights

    def _refusal(
        self, event: str, state: Enum, accepted: Iterable[Enum], remedy: str
    ) -> StateError:
        expected = " or ".join(one.value for one in accepted)
        return StateError(f"{self.name}: {event}: expected {expected}, got {state.value}. {remedy}")
