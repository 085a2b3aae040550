"""A bucket's memory always knows what it holds: which events may happen, and what they leave."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim import ops
from moe_optim.errors import StateError
from moe_optim.formats import MXFP8
from moe_optim.kernels.member_table import MemberTable, TableEntry
from moe_optim.megatron import buffer
from moe_optim.megatron.bucket_storage import BucketStorage, Content, Event
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import poisoned, wide_range_weights

NUMEL = 2 * 32 * 64
both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32 grads", "bf16 grads"]
)

LEAVES = {  # event -> content before: content after. Every other pair is refused.
    "ZERO": {"ZERO": "ZERO", "PARTIAL": "ZERO", "REDUCED": "ZERO", "SPENT": "ZERO"},
    "ACCUMULATE": {"ZERO": "PARTIAL", "PARTIAL": "PARTIAL"},
    "REDUCE": {"ZERO": "REDUCED", "PARTIAL": "REDUCED"},
    "READ": {"ZERO": "ZERO", "REDUCED": "REDUCED"},
    "SPEND": {"ZERO": "SPENT", "REDUCED": "SPENT", "SPENT": "SPENT"},
    "STAGE": {"ZERO": "STAGED", "SPENT": "STAGED"},
    "FLY": {"STAGED": "IN_FLIGHT"},
    "LAND": {"STAGED": "ZERO", "IN_FLIGHT": "ZERO"},
}
NAMES = {  # how errors call an event, and what they tell the caller to do
    "ZERO": ("zero_grad_buffer", "Let the parameter gather finish"),
    "ACCUMULATE": ("a backward pass", "Call zero_grad_buffer()"),
    "REDUCE": ("the gradient reduction", "Reduce once a step"),
    "READ": ("the optimizer reading its gradients", "Call finish_grad_sync()"),
    "SPEND": ("the optimizer step", "Call finish_grad_sync()"),
    "STAGE": ("the parameter gather", "Step or drop these gradients (zero_grad_buffer())"),
    "FLY": ("the dispatch of the parameter gather", "Only start_param_sync()"),
    "LAND": ("the end of the parameter gather", "Only start_param_sync()"),
}
PAIRS = [(content, event) for content in Content for event in Event]


def make_storage(content=Content.ZERO, dtype=torch.float32, numel=NUMEL):
    """Return storage full of nonzero values, which says that it holds ``content``."""
    grads = wide_range_weights(numel).to(dtype)
    grads[grads == 0] = 1
    storage = BucketStorage("bucket 7 (layers.0.fc2)", grads)
    storage.content = content
    return storage


def all_bytes(storage):
    return storage.grads.view(torch.uint8).clone()


def test_the_table_is_about_all_contents_and_events():
    assert set(LEAVES) == set(NAMES) == {event.name for event in Event}
    assert {before for row in LEAVES.values() for before in row} == {c.name for c in Content}


@pytest.mark.parametrize(("content", "event"), PAIRS, ids=lambda value: value.name)
def test_an_event_leaves_what_the_table_says_or_is_refused(content, event):
    """A refusal names the bucket, the event, the content and the remedy, and changes nothing."""
    storage = make_storage(content)
    before = all_bytes(storage)
    left = LEAVES[event.name].get(content.name)
    if left is None:
        what, remedy = NAMES[event.name]
        message = (
            rf"^bucket 7 \(layers\.0\.fc2\): {re.escape(what)}: expected .*, "
            rf"got {re.escape(content.value)}\. {re.escape(remedy)}"
        )
        with pytest.raises(StateError, match=message):
            storage.record(event)
        assert storage.content is content
    else:
        storage.record(event)
        assert storage.content is Content[left]
    assert_bytes_equal(storage.grads.view(torch.uint8), before, what="an event moves no byte")


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_a_refusal_lists_what_was_expected(event):
    accepted = [content for content in Content if content.name in LEAVES[event.name]]
    refused = next(content for content in Content if content not in accepted)
    expected = " or ".join(content.value for content in accepted)
    with pytest.raises(StateError, match=rf"expected {expected}, got {refused.value}\."):
        make_storage(refused).record(event)


def test_a_new_bucket_holds_zeros():
    assert BucketStorage("bucket", torch.zeros(4)).content is Content.ZERO


@both_dtypes
def test_staging_is_the_front_of_the_gradients_as_bf16(dtype):
    """One bf16 entry a gradient, in the same memory."""
    storage = make_storage(dtype=dtype)
    assert storage.staging.dtype == torch.bfloat16
    assert storage.staging.shape == storage.grads.shape
    assert storage.staging.data_ptr() == storage.grads.data_ptr()


@both_dtypes
@pytest.mark.parametrize(
    "content", [Content.PARTIAL, Content.REDUCED, Content.SPENT], ids=lambda content: content.name
)
def test_zeroing_makes_every_byte_zero(content, dtype):
    storage = make_storage(content, dtype)
    storage.zero()
    assert not all_bytes(storage).any()
    assert storage.content is Content.ZERO


def test_memory_that_is_zero_already_is_not_touched():
    """Not even read: the values that this test hides there survive."""
    storage = make_storage(Content.ZERO)
    before = all_bytes(storage)
    storage.zero()
    assert_bytes_equal(all_bytes(storage), before)


@pytest.mark.parametrize("content", [Content.STAGED, Content.IN_FLIGHT], ids=lambda c: c.name)
def test_zeroing_never_wipes_a_gather(content):
    storage = make_storage(content)
    before = all_bytes(storage)
    with pytest.raises(StateError, match="Let the parameter gather finish"):
        storage.zero()
    assert_bytes_equal(all_bytes(storage), before)


def test_the_owner_may_finish_a_gather_before_zeroing():
    """What it leaves is then zeroed or known to be zero, whatever was there before."""
    storage = make_storage(Content.IN_FLIGHT)
    seen = []

    def land():
        seen.append(storage.content)
        storage.grads.zero_()
        storage.record(Event.LAND)

    storage.before_zero = land
    storage.zero()
    assert seen == [Content.IN_FLIGHT]
    assert storage.content is Content.ZERO
    assert not all_bytes(storage).any()


def gather_into(storage, values):
    """Do what a bucket group does with a bucket, on one rank; return the planes it wrote."""
    target = poisoned(MXFP8, (2, 32, 64))
    source = storage.staging[: target.rowwise_data.numel()].view(2, 32, 64)
    table = MemberTable.build(
        [TableEntry(parameter="fc2", source=source, target=target)], consumed=storage.staging
    )
    storage.open_for_staging()
    source.copy_(values)
    storage.record(Event.FLY)
    ops.requantize(table)
    storage.record(Event.LAND)
    return target


@both_dtypes
@pytest.mark.parametrize("padding", [0, 1, 61], ids=lambda padding: f"{padding} padding")
def test_a_gather_over_spent_gradients_leaves_no_stale_byte(dtype, padding):
    """bf16 values cover half of fp32 gradients, and padding is covered by nothing."""
    storage = make_storage(Content.SPENT, dtype, NUMEL + padding)
    gather_into(storage, wide_range_weights(2, 32, 64, seed=1))
    assert storage.content is Content.ZERO
    assert not all_bytes(storage).any()


@both_dtypes
def test_a_gather_over_zeros_leaves_zeros(dtype):
    storage = BucketStorage("bucket", torch.zeros(NUMEL, dtype=dtype))
    gather_into(storage, wide_range_weights(2, 32, 64, seed=1))
    assert storage.content is Content.ZERO
    assert not all_bytes(storage).any()


@both_dtypes
@pytest.mark.parametrize(
    "content",
    [c for c in Content if c not in (Content.ZERO, Content.SPENT)],
    ids=lambda content: content.name,
)
def test_staging_never_overwrites_what_is_still_needed(content, dtype):
    storage = make_storage(content, dtype)
    before = all_bytes(storage)
    with pytest.raises(StateError, match=r"the parameter gather: .* they would be overwritten"):
        storage.open_for_staging()
    assert_bytes_equal(all_bytes(storage), before)
    assert storage.content is content


@pytest.mark.parametrize("content", [Content.ZERO, Content.SPENT], ids=lambda c: c.name)
def test_offloaded_memory_is_refused(content):
    storage = make_storage(content)
    storage.grads.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"^bucket 7 .*got none.*restore_grad_buffers\(\)"):
        storage.open_for_staging()
    assert storage.content is content


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["zero", "accumulate", "reduce", "step", "gather"])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_zeros_are_zeros_after_any_sequence_of_calls(steps, dtype):
    """Whatever a loop does, and whichever calls are refused: where the storage says that it holds
    zeros, every byte is zero."""
    storage = BucketStorage("bucket", torch.zeros(NUMEL, dtype=dtype))

    def accumulate():
        storage.record(Event.ACCUMULATE)
        storage.grads.add_(1)

    calls = {
        "zero": storage.zero,
        "accumulate": accumulate,
        "reduce": lambda: storage.record(Event.REDUCE),
        "step": lambda: storage.record(Event.SPEND),
        "gather": lambda: gather_into(storage, wide_range_weights(2, 32, 64)),
    }
    for step in steps:
        try:
            calls[step]()
        except StateError:
            continue
        if storage.content is Content.ZERO:
            assert not all_bytes(storage).any(), step


def test_gradients_of_a_graph_capture_are_not_noted(monkeypatch):
    """Megatron captures backward passes while buckets hold spent gradients, and zeroes what they
    leave; where there were zeros they must be zeroed again, so these are noted."""
    monkeypatch.setattr(buffer, "is_graph_capturing", lambda: True)
    for content, after in ((Content.SPENT, Content.SPENT), (Content.ZERO, Content.PARTIAL)):
        storage = BucketStorage("bucket", torch.zeros(64))
        storage.content = content
        buffer._note_gradient(storage, torch.zeros(1))
        assert storage.content is after
