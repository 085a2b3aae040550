"""What is waited for before gradient memory is zeroed, or given away.

Streams and collectives are noted instead of run: a CPU has neither in flight.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.buckets.bucket_group import GroupedBucketGroup
from moe_optim.buckets.buffer import GroupedParamAndGradBuffer


def test_reductions_over_several_instances_of_the_optimizer_are_waited_for(monkeypatch):
    """Megatron runs them on a stream of their own, and keeps no handle of them."""
    waited: list[Any] = []
    stream = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    group: Any = object.__new__(GroupedBucketGroup)
    group.managed, group.grad_reduce_handle = (), None
    group.communication_stream = "that of reductions"
    group.finish_communication()
    assert waited == ["that of reductions"]


@pytest.mark.parametrize("managed", [(), ("a bucket",)], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("moves", "finished"),
    [
        ({}, ["gather", "communication"]),
        ({"move_grads": False}, ["gather"]),
        ({"move_params": False}, ["communication"]),
    ],
    ids=["both", "weights", "gradients"],
)
def test_what_uses_memory_is_finished_before_it_is_given_away(moves, finished, managed):
    seen: list[str] = []
    buffer: Any = object.__new__(GroupedParamAndGradBuffer)
    buffer.managed, buffer.buckets = managed, ()
    buffer.param_data = buffer.grad_data = None
    buffer.groups = [
        SimpleNamespace(
            finish_gather=lambda: seen.append("gather"),
            finish_communication=lambda: seen.append("communication"),
        )
    ]
    buffer.offload_to_cpu(**moves)
    assert seen == finished
