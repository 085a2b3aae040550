"""What a group of buckets says of its weights and gradients, whatever communicates for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.buckets.bucket_group import GroupedBucketGroup, gather_weights
from moe_optim.buckets.layout import side_by_side
from moe_optim.buckets.states import Event, Gradients, Weights
from moe_optim.errors import StateError
from moe_optim.formats import MXFP8
from tests.support.states.buckets import make_bucket, make_params

SLOTS = side_by_side([(2, 32, 64)], name="layers.0.fc")
REACHED_BY = {
    Weights.FRESH: (),
    Weights.STALE: (Event.SETTLE,),
    Weights.MOVING: (Event.STEP,),
    Weights.ENCODED: (Event.STEP, Event.ENCODE),
    Weights.IN_FLIGHT: (Event.SETTLE, Event.GATHER),
    Weights.OFFLOADED: (Event.OFFLOAD,),
    Weights.STALE_OFFLOADED: (Event.SETTLE, Event.OFFLOAD),
}


def bucket_that_is(weights: Weights = Weights.FRESH, *events: Event) -> Any:
    bucket = make_bucket(make_params(MXFP8, SLOTS), SLOTS, torch.zeros(2 * 32 * 64))
    for event in (*REACHED_BY[weights], *events):
        bucket.state.record(event)
    assert bucket.state.weights is weights
    return bucket


@pytest.mark.parametrize("weights", Weights, ids=lambda weights: weights.name)
def test_a_gather_is_due_where_some_weights_are_behind_and_here(weights):
    """Encoded ones are, too: what other ranks have encoded has not arrived."""
    group = SimpleNamespace(managed=(bucket_that_is(), bucket_that_is(weights)))
    is_due = not GroupedBucketGroup.param_gather_dispatched.fget(group)
    assert is_due == (weights in (Weights.STALE, Weights.ENCODED))


def reading(**changes: Any) -> SimpleNamespace:
    """Return one rank's group whose backward pass is done, and which nobody has reduced."""
    facts = {"ranks": 1, "instances": 1, "overlap": False, "scale": 1} | changes
    config = SimpleNamespace(
        num_distributed_optimizer_instances=facts["instances"],
        overlap_grad_reduce=facts["overlap"],
    )
    return SimpleNamespace(
        finish_gather=lambda: None,
        intra_distributed_optimizer_instance_size=facts["ranks"],
        ddp_config=config,
        buckets=[SimpleNamespace(gradient_scaling_factor=facts["scale"])],
        managed=(bucket_that_is(Weights.FRESH, Event.ACCUMULATE),),
    )


def test_gradients_of_one_rank_need_no_reduction():
    group: Any = reading()
    GroupedBucketGroup.read_gradients(group)
    assert group.managed[0].state.gradients is Gradients.REDUCED


@pytest.mark.parametrize(
    "change", [{"ranks": 2}, {"instances": 2}, {"overlap": True}, {"scale": 0.5}], ids=str
)
def test_gradients_that_others_share_or_something_scales_are_reduced_before_they_are_read(change):
    group: Any = reading(**change)
    with pytest.raises(StateError, match="expected zeros or reduced gradients"):
        GroupedBucketGroup.read_gradients(group)
    assert group.managed[0].state.gradients is Gradients.PARTIAL


@pytest.mark.parametrize(
    ("apart", "gathers"), [([True, True], True), ([True, False], False), ([False], False)], ids=str
)
def test_weights_that_share_memory_with_gradients_are_not_gathered_for_a_reader(apart, gathers):
    """One such bucket of a group is enough: gradients that lie there would be overwritten."""
    called = []
    memory = torch.zeros(8)
    buckets = [
        SimpleNamespace(grad_data=memory, param_data=torch.zeros(8) if is_apart else memory[:4])
        for is_apart in apart
    ]
    group = SimpleNamespace(buckets=buckets, start_param_sync=lambda **how: called.append(how))
    config = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True)
    chunk = SimpleNamespace(
        ddp_config=config, bucket_groups=[group], expert_parallel_bucket_groups=[]
    )
    gather_weights(chunk)
    assert called == ([{"force_sync": True}] if gathers else [])
