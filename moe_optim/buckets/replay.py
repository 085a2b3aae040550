"""Bucket states under CUDA graphs of whole iterations.

A capture runs Python and updates bucket states; a replay only runs the same kernels on the same
memory. Each capture therefore records every bucket's plan number and its states before and after. A
replay from any other state is refused before a kernel runs; otherwise it sets the final states.
Buckets are checked when Megatron's wrapper reads the data, and updated when it counts the
iteration.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from moe_optim.buckets.bucket_group import GroupedBucketGroup, bucket_groups
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import BucketContents
from moe_optim.integration.engine import original

_WRAPPER = "megatron.core.full_cuda_graph:FullCudaGraphWrapper"


@dataclass(frozen=True, slots=True)
class Captured:
    """Effect of a graph on one bucket."""

    bucket: ManagedBucket
    begins_with: BucketContents
    leaves: BucketContents
    plan_number: tuple[int, int]


_captures: WeakKeyDictionary[Any, tuple[Captured, ...]] = WeakKeyDictionary()
"""Graph -> its effect on every bucket."""
_begun: WeakKeyDictionary[Any, dict[ManagedBucket, BucketContents]] = WeakKeyDictionary()
"""Wrapper -> bucket contents at the start of the current iteration; empty for a replay."""


def begin_iteration(
    self: FullCudaGraphWrapper,
    data_iterator: Any,
    model: Any,
    training: bool,
    num_microbatches: int,
) -> Any:
    """Read the data of an iteration as Megatron does, if its graph may be replayed now.

    A capture of training includes the gather that forward pre-hooks start, even right after an
    evaluation has gathered, since replays follow steps; Megatron's captures do not. The same gather
    runs eagerly once before the capture, which cannot plan or compile. Every rank of the groups
    must call it.

    Raises:
        StateError: the graph was captured from other contents, or memory has moved since; nothing
            has run.
    """
    stage = "training" if training else "validation"
    graph = self.cuda_graph[stage]
    chunks = model if isinstance(model, list) else [model]
    if graph is None:
        if training and self.curr_iter(stage) == self.cuda_graph_warmup_steps:
            gathering = [chunk for chunk in chunks if chunk.remove_forward_pre_hook_handles]
            for group in _groups(gathering):
                group.gather_anew()
                group.start_param_sync(force_sync=True)  # plans and compiles, as no capture can
                group.gather_anew()
        managed = [bucket for group in _groups(chunks) for bucket in group.managed]
        _begun[self] = {bucket: bucket.state.contents for bucket in managed}
    else:
        _begun[self] = {}
        for one in _captures[graph]:
            one.bucket.require_replayable(one.begins_with, one.leaves, one.plan_number)
    return original(f"{_WRAPPER}.data_read")(self, data_iterator, model, training, num_microbatches)


def end_iteration(self: FullCudaGraphWrapper, stage: str) -> None:
    """Count an iteration as Megatron does, and record the effect of a capture or replay."""
    original(f"{_WRAPPER}.next_iter")(self, stage)
    graph = self.cuda_graph[stage]
    if graph is None:
        return
    if graph not in _captures:
        _captures[graph] = tuple(
            Captured(bucket, begins_with, bucket.state.contents, bucket.plan_number)
            for bucket, begins_with in _begun[self].items()
        )
        return
    for one in _captures[graph]:
        one.bucket.replayed(one.begins_with, one.leaves)


def _groups(chunks: Iterable[Any]) -> Iterator[GroupedBucketGroup]:
    return (group for group in bucket_groups(chunks) if isinstance(group, GroupedBucketGroup))
