"""A bucket always knows what it holds: which events may happen, and what they leave."""

import re

import pytest

from moe_optim.buckets.states import (
    OWN_MEMORY,
    SHARED_MEMORY,
    BucketContents,
    BucketState,
    Event,
    Gradients,
    Weights,
)
from moe_optim.errors import StateError

GRADIENTS = {  # event -> gradients before: after. Every other state is refused.
    "ZERO": {"ZERO": "ZERO", "PARTIAL": "ZERO", "REDUCED": "ZERO", "SPENT": "ZERO"},
    "ACCUMULATE": {"ZERO": "PARTIAL", "PARTIAL": "PARTIAL"},
    "REDUCE": {"ZERO": "REDUCED", "PARTIAL": "REDUCED"},
    "READ": {"ZERO": "ZERO", "REDUCED": "REDUCED"},
    "STEP": {"ZERO": "SPENT", "REDUCED": "SPENT", "SPENT": "SPENT"},
}
SHARED_GRADIENTS = {  # where the gather goes through them; elsewhere it takes any, and changes none
    "GATHER": {"ZERO": "IN_FLIGHT", "SPENT": "IN_FLIGHT"},
    "FINISH": {"IN_FLIGHT": "ZERO"},
    "FAIL": {"IN_FLIGHT": "SPENT"},
}
WEIGHTS = {
    "STEP": {"FRESH": "MOVING", "STALE": "MOVING", "ENCODED": "MOVING"},
    "SETTLE": {"FRESH": "STALE", "STALE": "STALE", "MOVING": "STALE", "ENCODED": "STALE"},
    "ENCODE": {"MOVING": "ENCODED"},
    "GATHER": {"STALE": "IN_FLIGHT", "ENCODED": "IN_FLIGHT"},
    "FINISH": {"IN_FLIGHT": "FRESH"},
    "FAIL": {"IN_FLIGHT": "STALE"},
    "OFFLOAD": {"FRESH": "OFFLOADED", "STALE": "STALE_OFFLOADED", "ENCODED": "STALE_OFFLOADED"},
    "RELOAD": {"OFFLOADED": "FRESH", "STALE_OFFLOADED": "STALE"},
}
NAMES = {  # how errors call an event, and what they tell the caller to do
    "ZERO": ("zero_grad_buffer", "Let the parameter gather finish"),
    "ACCUMULATE": ("a backward pass", "Call zero_grad_buffer()"),
    "REDUCE": ("the gradient reduction", "Reduce once a step"),
    "READ": ("the optimizer reading its gradients", "Call finish_grad_sync()"),
    "STEP": ("the optimizer step", "Call "),
    "SETTLE": ("new masters", "Call reload_from_cpu()"),
    "ENCODE": ("new masters, encoded with their step", "Only optimizer.step() encodes"),
    "GATHER": ("the parameter gather", ""),
    "FINISH": ("the end of the parameter gather", ""),
    "FAIL": ("a parameter gather that failed", ""),
    "OFFLOAD": ("offload_to_cpu", "Offload between two steps"),
    "RELOAD": ("reload_from_cpu", "Call offload_to_cpu() first"),
}
TABLES = {"own": OWN_MEMORY, "shared": SHARED_MEMORY}
EVERY_GRADIENTS = {state.name: state.name for state in Gradients}
EVERY_WEIGHTS = {state.name: state.name for state in Weights}


def all_states(table):
    """Return every state that a bucket can be led into, found by trying all events on each."""
    states, seen, routes = [], set(), [()]
    while routes:
        route = routes.pop(0)
        state = BucketState("bucket 7 (layers.0.fc2)", table)
        for event in route:
            state.record(event)
        if (state.gradients, state.weights) in seen:
            continue
        seen.add((state.gradients, state.weights))
        states.append(state)
        rows = [(event, table[event]) for event in Event]
        routes += [
            (*route, event)
            for event, row in rows
            if state.gradients in row.gradients and state.weights in row.weights
        ]
    return states


def test_the_tables_are_about_all_states_and_events():
    """And lead to every state; a bucket with memory of its own never has weights in it."""
    assert set(NAMES) == {event.name for event in Event} == {e.name for e in OWN_MEMORY}
    own, shared = ({(s.gradients, s.weights) for s in all_states(t)} for t in TABLES.values())
    assert {weights for _, weights in own} == {weights for _, weights in shared} == set(Weights)
    assert {gradients for gradients, _ in shared} == set(Gradients)
    assert {gradients for gradients, _ in own} == set(Gradients) - {Gradients.IN_FLIGHT}


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
@pytest.mark.parametrize("kind", TABLES)
def test_an_event_leaves_what_the_table_says_or_is_refused(kind, event):
    """In every state. A refusal names the bucket, the event, the state and the remedy, and changes
    nothing."""
    rows = GRADIENTS | (SHARED_GRADIENTS if kind == "shared" else {})
    for state in all_states(TABLES[kind]):
        gradients, weights = state.gradients, state.weights
        after = (
            rows.get(event.name, EVERY_GRADIENTS).get(gradients.name),
            WEIGHTS.get(event.name, EVERY_WEIGHTS).get(weights.name),
        )
        if None not in after:
            state.record(event)
            assert (state.gradients.name, state.weights.name) == after
            continue
        what, remedy = NAMES[event.name]
        got = gradients if after[0] is None else weights
        message = (
            rf"^bucket 7 \(layers\.0\.fc2\): {re.escape(what)}: expected .*, "
            rf"got {re.escape(got.value)}\. {re.escape(remedy)}.*[.]$"
        )
        with pytest.raises(StateError, match=message):
            state.record(event)
        assert (state.gradients, state.weights) == (gradients, weights)


def replay(
    held: BucketContents, begins_with: BucketContents, leaves: BucketContents
) -> BucketContents | None:
    """Return what a bucket holds after a replay from ``held``, None where it is refused."""
    state = BucketState("bucket", OWN_MEMORY)
    state.gradients, state.weights = held.gradients, held.weights
    try:
        state.require_replayable(begins_with, leaves)
    except StateError as refused:
        assert "reset_cuda_graph()" in str(refused)
        return None
    state.replay(begins_with, leaves)
    return state.contents


@pytest.mark.parametrize("gradients", Gradients, ids=lambda gradients: gradients.name)
def test_gradients_that_a_capture_has_left_alone_may_be_any_at_its_replay(gradients):
    """Those that it has used must be what they were."""
    spent, zero = Gradients.SPENT, Gradients.ZERO
    held, alone = BucketContents(gradients, Weights.FRESH), BucketContents(spent, Weights.FRESH)
    assert replay(held, alone, alone) == held
    zeroed, reduced = (
        BucketContents(zero, Weights.FRESH),
        BucketContents(Gradients.REDUCED, Weights.FRESH),
    )
    assert replay(held, zeroed, reduced) == (reduced if gradients is zero else None)


@pytest.mark.parametrize("weights", Weights, ids=lambda weights: weights.name)
def test_weights_that_a_capture_has_gathered_may_be_gathered_or_encoded_at_its_replay(weights):
    """Of the same masters they are the same bytes; weights that it has only read must be there."""
    held = BucketContents(Gradients.ZERO, weights)
    stale, fresh = (BucketContents(Gradients.ZERO, one) for one in (Weights.STALE, Weights.FRESH))
    may_be = (Weights.STALE, Weights.FRESH, Weights.ENCODED)
    assert replay(held, stale, fresh) == (fresh if weights in may_be else None)
    assert replay(held, fresh, fresh) == (fresh if weights is Weights.FRESH else None)
