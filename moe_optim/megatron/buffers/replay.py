"""CUDA graphs of whole iterations: what a replay does is told to the buckets.

A capture runs Python, so that buckets note what it does to them. A replay runs kernels alone: the
same ones, on the same memory, whatever the notes say. So each capture remembers from what to what
it has led every bucket, and where masters and weights lay; a replay that does not start there is
refused before a kernel runs, and one that does leaves the same notes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from moe_optim.megatron.buffers.bucket_group import GroupedBucketGroup
from moe_optim.megatron.buffers.managed_bucket import ManagedBucket
from moe_optim.megatron.buffers.states import Held
from moe_optim.megatron.patching.engine import original

_CALL = "megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__"


@dataclass(frozen=True, slots=True)
class Captured:
    """What a graph does to one bucket."""

    begins_with: Held
    leaves: Held
    plan: tuple[int, int]
    """:attr:`ManagedBucket.plan` at the capture."""


_captures: WeakKeyDictionary[Any, dict[ManagedBucket, Captured]] = WeakKeyDictionary()
"""By the graph."""


def run_or_replay(self: FullCudaGraphWrapper, *args: Any, **kwargs: Any) -> Any:
    """Run, capture or replay an iteration as Megatron does, and tell the buckets of a replay.

    Every rank must call it, as the function that is wrapped.

    Raises:
        StateError: the graph was captured from other contents, or memory has moved since; nothing
            has run.
    """
    buckets = [bucket for group in _groups(kwargs["model"]) for bucket in group.managed]
    stage = "validation" if kwargs["forward_only"] else "training"
    graph = self.cuda_graph[stage]
    if graph is not None and buckets:
        captured = _captures[graph]
        for bucket in buckets:
            one = captured[bucket]
            bucket.require_replayable(one.begins_with, one.leaves, one.plan)
        result = original(_CALL)(self, *args, **kwargs)
        for bucket in buckets:
            bucket.replayed(captured[bucket].begins_with, captured[bucket].leaves)
        return result
    before = {bucket: bucket.state.held for bucket in buckets}
    result = original(_CALL)(self, *args, **kwargs)
    if self.cuda_graph[stage] is not None:
        _captures[self.cuda_graph[stage]] = {
            bucket: Captured(begins_with=held, leaves=bucket.state.held, plan=bucket.plan)
            for bucket, held in before.items()
        }
    return result


def _groups(model: Any) -> Iterator[GroupedBucketGroup]:
    chunks: Iterable[Any] = model if isinstance(model, list) else [model]
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if isinstance(group, GroupedBucketGroup):
                yield group
