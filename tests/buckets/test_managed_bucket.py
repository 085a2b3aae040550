"""A bucket's gradient memory: zeroed, watched, and lent to a gather that leaves zeros."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optim.buckets import managed_bucket
from moe_optim.buckets.layout import side_by_side
from moe_optim.buckets.states import BucketContents, Event, Gradients, Weights
from moe_optim.errors import StateError
from moe_optim.formats import MXFP8, NVFP4, reference
from moe_optim.weights.te.storage import TransformerEngineStorage
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.inputs import wide_range_weights
from tests.support.states.buckets import REACHED_BY, make_bucket, make_params, own_masters
from tests.support.te import te_stand_ins

SLOTS = side_by_side([(2, 32, 64)], name="layers.0.fc")
NUMEL = 2 * 32 * 64
both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32 grads", "bf16 grads"]
)


def bucket_over(grads, seed=1):
    """Return a bucket that shares its gradient memory, and owns all of its masters."""
    params = make_params(MXFP8, SLOTS)
    for param in params:
        param.quantized_storage.write(wide_range_weights(2, 32, 64))
    wholes = [wide_range_weights(2, 32, 64, seed=seed)]
    masters = own_masters(params, SLOTS, wholes, 0, grads.numel())
    return make_bucket(params, SLOTS, grads, wire="bf16", masters=masters)


def full_bucket(gradients=Gradients.ZERO, dtype=torch.float32, numel=NUMEL):
    """Return a bucket full of nonzero values, which has been led to say that it holds these."""
    grads = wide_range_weights(numel).to(dtype)
    grads[grads == 0] = 1
    bucket = bucket_over(grads)
    for event in REACHED_BY[gradients]:
        bucket.state.record(event)
    return bucket


def all_bytes(bucket):
    return bucket.grads.view(torch.uint8).clone()


# Gradients that nobody announces


def watched():
    """Return a bucket of zeros whose weights are stale, and a gradient in it."""
    bucket = bucket_over(torch.zeros(NUMEL))
    bucket.state.record(Event.SETTLE)
    gradient = bucket.grads.data[:32]
    bucket.watch(gradient)
    return bucket, gradient


def test_gradients_written_by_hand_are_not_gathered_over():
    bucket, gradient = watched()
    gradient.fill_(1)
    with pytest.raises(StateError, match="they would be overwritten"):
        bucket.open_gather()
    assert bucket.state.gradients is Gradients.PARTIAL
    assert gradient.all()


def test_gradients_written_into_a_gather_in_flight_are_found():
    """The masters are gathered again; what was written is lost, and somebody hears of it."""
    bucket, gradient = watched()
    bucket.open_gather()
    gradient.fill_(1)
    with pytest.raises(StateError, match=r"got gradients written directly\. Call start_param_sync"):
        bucket.finish()
    bucket.give_up_gather()
    assert bucket.state.gradients is Gradients.SPENT
    gather(bucket)
    assert not all_bytes(bucket).any()


def test_what_the_bucket_itself_writes_is_no_gradient():
    bucket, _ = watched()
    for _ in range(2):
        bucket.zero()
        gather(bucket)
        bucket.find_unannounced(thoroughly=True)
        assert bucket.state.gradients is Gradients.ZERO
        bucket.state.record(Event.SETTLE)


def test_gradients_of_kernels_that_count_no_write_are_found_by_reading():
    """A fused product of Transformer Engine adds them, and raises before any hook has run."""
    bucket, _ = watched()
    bucket.grads.numpy()[7] = 1
    bucket.find_unannounced()
    assert bucket.state.gradients is Gradients.ZERO
    bucket.find_unannounced(thoroughly=True)
    assert bucket.state.gradients is Gradients.PARTIAL


# Gathers through the memory


def gather(bucket):
    """Do what a bucket group does with a bucket whose weights are stale, on one rank."""
    bucket.open_gather()
    bucket.gather.encode()
    bucket.finish()


@both_dtypes
@pytest.mark.parametrize("padding", [0, 2, 62], ids=lambda padding: f"{padding} padding")
def test_a_gather_over_spent_gradients_leaves_no_stale_byte(dtype, padding):
    """bf16 values cover half of fp32 gradients, and padding is covered by nothing."""
    bucket = full_bucket(Gradients.SPENT, dtype, NUMEL + padding)
    gather(bucket)
    assert bucket.state.gradients is Gradients.ZERO
    assert not all_bytes(bucket).any()


@pytest.mark.parametrize("at", ["open", "encode", "finish"])
def test_a_gather_that_fails_leaves_memory_that_can_be_used(at, monkeypatch):
    """The next one is whole, and leaves zeros as every other."""
    bucket = full_bucket(Gradients.SPENT)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(bucket.gather, at, _raise)
        gather(bucket)
    bucket.give_up_gather()
    assert bucket.state.contents == BucketContents(Gradients.SPENT, Weights.STALE)
    gather(bucket)
    assert bucket.state.weights is Weights.FRESH
    assert not all_bytes(bucket).any()


def _raise(*_, **__):
    raise MemoryError


@settings(max_examples=100)
@given(
    steps=st.lists(st.sampled_from(["zero", "accumulate", "reduce", "step", "settle", "gather"])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_zeros_are_zeros_after_any_sequence_of_calls(steps, dtype):
    """Whatever a loop does, and whichever calls are refused: where the bucket says that it holds
    zeros, every byte is zero."""
    bucket = bucket_over(torch.zeros(NUMEL, dtype=dtype))

    def accumulate():
        bucket.before_gradient()
        bucket.grads.add_(1)

    calls = {
        "zero": bucket.zero,
        "accumulate": accumulate,
        "reduce": lambda: bucket.state.record(Event.REDUCE),
        "step": lambda: bucket.state.record(Event.STEP),
        "settle": lambda: bucket.state.record(Event.SETTLE),
        "gather": lambda: gather(bucket),
    }
    for step in steps:
        try:
            calls[step]()
        except StateError:
            continue
        if bucket.state.gradients is Gradients.ZERO:
            assert not all_bytes(bucket).any(), step


def test_gradients_of_a_graph_capture_are_not_noted(monkeypatch):
    """Megatron captures backward passes while buckets hold spent gradients, and zeroes what they
    leave; where there were zeros they must be zeroed again, so these are noted."""
    monkeypatch.setattr(managed_bucket, "is_graph_capturing", lambda: True)
    for content, after in ((Gradients.SPENT, Gradients.SPENT), (Gradients.ZERO, Gradients.PARTIAL)):
        bucket = full_bucket(content)
        bucket.before_gradient()
        assert bucket.state.gradients is after


# What is known of weights and masters


def quantized_bucket():
    """Return a bucket whose gather has memory of its own, and its masters; weights are theirs."""
    params = make_params(MXFP8, SLOTS)
    wholes = [wide_range_weights(2, 32, 64)]
    masters = own_masters(params, SLOTS, wholes, 0, NUMEL)
    bucket = make_bucket(params, SLOTS, torch.zeros(NUMEL), masters=masters)
    bucket.state.record(Event.SETTLE)
    gather(bucket)
    return bucket, masters[0]


def plan_step(bucket):
    return bucket.plan_step(bucket.owner.book.check_bucket(bucket))


def assert_weights_are_of(bucket, master):
    (storage,) = bucket.storages
    want = reference.quantize(master.view(storage.shape), storage.format).buffers()
    assert_same_tensors(storage.quantized.buffers(), want)


@pytest.mark.parametrize("is_written", [True, False], ids=["written", "left alone"])
def test_masters_that_are_written_after_a_step_has_encoded_them_are_encoded_anew(is_written):
    """And only then: of masters left alone a gather takes what the step has encoded."""
    bucket, one = quantized_bucket()
    table = plan_step(bucket)
    bucket.state.record(Event.STEP)
    one.master.neg_()
    table = plan_step(bucket)  # as a step looks, whose own writes count none
    table.launch()
    bucket.settle(encoded=True)
    if is_written:
        one.master.mul_(3)
    else:
        encoded = one.master.clone()
        one.master.numpy()[:] = 7  # behind the counter's back: a gather does not look
    gather(bucket)
    assert_weights_are_of(bucket, one.master if is_written else encoded)


def test_a_gather_brings_weights_of_another_version():
    bucket, _ = quantized_bucket()
    (storage,) = bucket.storages
    before = storage.version
    bucket.state.record(Event.SETTLE)
    gather(bucket)
    assert storage.version > before


def test_a_replay_brings_another_version_where_its_capture_has_gathered():
    bucket, _ = quantized_bucket()
    stale, fresh = (
        BucketContents(Gradients.ZERO, weights) for weights in (Weights.STALE, Weights.FRESH)
    )
    before = bucket.version
    bucket.replayed(fresh, fresh)
    assert bucket.version == before
    bucket.replayed(stale, fresh)
    assert bucket.version > before


def test_a_replay_is_refused_once_a_master_lies_elsewhere():
    bucket, one = quantized_bucket()
    held, plan = bucket.state.contents, bucket.plan_number
    bucket.require_replayable(held, held, plan)
    one.master.data = one.master.data.clone()
    with pytest.raises(StateError, match="expected masters, weights and gradients where they lay"):
        bucket.require_replayable(held, held, plan)


def test_a_replay_is_refused_once_masters_were_planned_anew():
    bucket, _ = quantized_bucket()
    held, plan = bucket.state.contents, bucket.plan_number
    bucket.forget_masters()
    with pytest.raises(StateError, match="expected masters, weights and gradients where they lay"):
        bucket.require_replayable(held, held, plan)


@pytest.mark.parametrize("is_behind", [True, False], ids=["behind", "current"])
def test_a_bucket_over_weights_that_are_behind_knows_it(is_behind):
    """Those of a model that is wrapped once more after a step."""
    first, _ = quantized_bucket()
    if is_behind:
        first.state.record(Event.SETTLE)
    second = make_bucket(first.params, SLOTS, torch.zeros(NUMEL))
    assert second.state.weights is (Weights.STALE if is_behind else Weights.FRESH)


def test_initial_values_that_came_with_other_tensors_are_dropped_by_the_next_gather():
    """Transformer Engine's modules tell nobody of them."""
    bucket, _ = quantized_bucket()
    (storage,) = bucket.storages
    storage._initial = torch.ones(storage.shape)
    bucket.forget_masters()
    bucket.state.record(Event.SETTLE)
    gather(bucket)
    assert storage.initial is None


def test_a_gather_through_gradient_memory_that_has_come_back_elsewhere_reads_it_there():
    bucket = full_bucket(Gradients.SPENT)
    gather(bucket)
    memory, before = bucket.grads.untyped_storage(), bucket.grads.data_ptr()
    size, taken = memory.size(), []
    while bucket.grads.data_ptr() in (0, before):  # whoever takes the memory meanwhile keeps it
        memory.resize_(0)
        taken.append(torch.full((NUMEL,), torch.nan))
        memory.resize_(size)
    bucket.grads.zero_()
    bucket.state.record(Event.SETTLE)
    (one,) = bucket.owner.masters_of(bucket)
    one.master.neg_()
    gather(bucket)
    assert_weights_are_of(bucket, one.master)


def test_a_gather_makes_no_launch_over_gradient_memory_that_has_moved():
    """Kernels read by address; a table without launches would not show it."""
    bucket = full_bucket(Gradients.SPENT)
    gather(bucket)
    bucket.gather._table = SimpleNamespace(has_moved=True)
    bucket.state.record(Event.SETTLE)
    gather(bucket)
    assert_weights_are_of(bucket, bucket.owner.masters_of(bucket)[0].master)


def test_masters_that_move_after_a_step_has_encoded_them_are_encoded_anew():
    bucket, one = quantized_bucket()
    bucket.state.record(Event.STEP)
    plan_step(bucket).launch()
    bucket.settle(encoded=True)
    one.master.data = one.master.data.neg()
    gather(bucket)
    assert_weights_are_of(bucket, one.master)


def test_amaxes_of_other_ranks_are_zero_before_the_maximum_over_ranks():
    """Those of the gather before would outlive masters that have become smaller."""
    params = make_params(NVFP4, SLOTS)
    wholes = [wide_range_weights(2, 32, 64)]
    masters = own_masters(params, SLOTS, wholes, 0, NUMEL // 2)  # the first of two experts
    bucket = make_bucket(params, SLOTS, torch.zeros(NUMEL), dp_size=2, masters=masters)
    (amaxes,) = bucket.gather.reduced
    amaxes.fill_(7)
    bucket.state.record(Event.SETTLE)
    bucket.open_gather()
    bucket.gather.encode()
    mine = reference.quantize(wholes[0][:1], NVFP4).global_amax
    assert_bytes_equal(amaxes, torch.cat([mine, torch.zeros(1)]))


def test_a_weight_of_transformer_engine_is_written_where_it_was_given_another_tensor():
    """As its modules do with scales, without a word."""
    master = wide_range_weights(32, 64)
    weight = te_stand_ins.as_parameter(te_stand_ins.MXFP8Tensor(MXFP8, master))
    weight.quantized_storage = TransformerEngineStorage(weight, MXFP8)
    slots = side_by_side([(1, 32, 64)], name="layers.0.fc")
    own = own_masters([weight], slots, [master.neg()], 0, master.numel())
    bucket = make_bucket([weight], slots, torch.zeros(master.numel()), masters=own)
    for _ in range(2):
        bucket.state.record(Event.SETTLE)
        gather(bucket)
        own[0].master.mul_(4)
        weight._rowwise_scale_inv = torch.zeros_like(weight._rowwise_scale_inv)
    bucket.state.record(Event.SETTLE)
    gather(bucket)
    want = reference.quantize(own[0].master.view(1, 32, 64), MXFP8)
    expected = te_stand_ins.padded_scale(want, "rowwise")
    assert_bytes_equal(weight._rowwise_scale_inv, expected)
