"""CUDA graphs on a CPU: what was captured runs again, and Python's notes are as if it had not.

That is what a replay is on a GPU: the same kernels on the same memory, unknown to the host.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from moe_optim.buckets.states import BucketContents


class EmulatedGraph:
    """Stands in for ``torch.cuda.CUDAGraph``. Emulates what happens to managed buckets alone."""

    buckets: Callable[[], list[Any]]
    function: Callable[[], Any]

    def __init__(self) -> None:
        self._begun: list[BucketContents] = []
        self._captured_now = False

    def begin(self) -> None:
        """Run what follows: a capture runs Python, and here its kernels, too."""
        self._begun = [bucket.state.contents for bucket in EmulatedGraph.buckets()]
        self._captured_now = True

    def replay(self) -> None:
        """Run the kernels; those of the capture itself have run already."""
        if self._captured_now:
            self._captured_now = False
            return
        buckets = EmulatedGraph.buckets()
        before = [bucket.state.contents for bucket in buckets]
        for bucket, held in zip(buckets, self._begun, strict=True):
            bucket.state.replay(bucket.state.contents, held)
        EmulatedGraph.function()
        for bucket, held in zip(buckets, before, strict=True):
            bucket.state.replay(bucket.state.contents, held)


@contextmanager
def _capture(graph: EmulatedGraph, **_: Any) -> Iterator[None]:
    graph.begin()
    yield


def wrap(function: Callable[[], Any], model: list[Any], warmup: int) -> Callable[[bool], Any]:
    """Return what runs ``function`` under Megatron's wrapper: eagerly, captured, then replayed.

    Args:
        function: forward and backward passes, and the reduction of gradients.
        model: DDP-wrapped chunks.
        warmup: eager runs before the capture.
    """
    torch.cuda.CUDAGraph, torch.cuda.graph = EmulatedGraph, _capture
    torch.cuda.graph_pool_handle = lambda: None
    full_cuda_graph.get_all_rng_states = dict
    EmulatedGraph.function = staticmethod(function)
    EmulatedGraph.buckets = staticmethod(
        lambda: [
            bucket.managed
            for chunk in model
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            for bucket in group.buckets
            if hasattr(bucket, "managed")
        ]
    )
    wrapper = FullCudaGraphWrapper(lambda **_: function(), cuda_graph_warmup_steps=warmup)
    wrapper.reset_cuda_graph()

    def call(forward_only: bool = False) -> Any:
        return wrapper(
            model=model,
            data_iterator=None,
            num_microbatches=1,
            seq_length=1,
            forward_only=forward_only,
        )

    return call
