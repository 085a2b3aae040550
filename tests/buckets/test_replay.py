"""CUDA graphs of whole iterations: what a replay did is known, or the replay does not run."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.buckets import replay
from moe_optim.buckets.bucket_group import GroupedBucketGroup
from moe_optim.buckets.layout import side_by_side
from moe_optim.buckets.states import Event
from moe_optim.errors import StateError
from moe_optim.formats import MXFP8
from tests.support.states import life_cycle
from tests.support.states.buckets import make_bucket, make_params
from tests.support.states.life_cycle import LifeCycle

SETTINGS = {
    "wire quantized, overlap": {"wire": "quantized", "overlap": True},
    "wire bf16, overlap": {"wire": "bf16", "overlap": True},
    "wire quantized": {"wire": "quantized", "overlap": False, "format": "nvfp4"},
    "wire bf16": {"wire": "bf16", "overlap": False},
}


class GraphedLifeCycle(LifeCycle):
    """Micro-batches, their reduction included, run eagerly, are captured, then replayed."""

    def __init__(self, warmup: int = 2, **options: Any) -> None:
        from tests.support.steps import emulated_graphs

        super().__init__(**options)
        self.seed = 0
        self.iterate = emulated_graphs.wrap(self._iterate, [self.ddp], warmup=warmup)
        self._reduce, self.ddp.finish_grad_sync = self.ddp.finish_grad_sync, lambda: None

    def _iterate(self) -> None:
        super()._forward_backward(self.seed)
        self._reduce()

    def _forward_backward(self, seed: int) -> None:
        self.seed = seed
        self.iterate()

    def train(self, seed: int) -> None:
        self.zero()
        self.check()
        self.micro(seed, last=True)
        self.check()
        self.step()
        self.check()


@life_cycle.on_a_rank
def test_replayed_iterations_are_those_of_plain_torch():
    """Weights, gradients and outputs after every call, with evaluations and saves between them."""
    for options in SETTINGS.values():
        _replay(options)


def _replay(options: dict[str, Any]) -> None:
    cycle = GraphedLifeCycle(**options)
    for seed in range(6):  # two eager ones, the capture, three replays
        if seed == 2:
            cycle.evaluate(50)  # weights are fresh at the capture, and stale at every replay
        cycle.train(seed)
    for seed in range(6, 12):
        cycle.evaluate(seed)
        cycle.check()
        cycle.train(seed)
        cycle.force_sync()
        cycle.save()
        cycle.check()
    cycle.train(20)
    cycle.train(21)
    cycle.rollout(22)


class WatchedLifeCycle(GraphedLifeCycle):
    """Notes the tables of all gathers when a capture begins; None where there is none yet."""

    captured_with: list[Any] | None = None

    def tables(self) -> list[Any]:
        return [
            bucket.gather._table for group in self._managed_groups() for bucket in group.managed
        ]

    def _iterate(self) -> None:
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        if FullCudaGraphWrapper.cuda_graph["training"] is not None and self.captured_with is None:
            self.captured_with = self.tables()
        super()._iterate()


@life_cycle.on_a_rank
def test_a_capture_is_not_the_first_to_gather():
    """Whatever the number of eager iterations before it, the tables of gathers are there by then,
    and training is that of plain torch."""
    for warmup, wire in product((0, 1, 2), ("quantized", "bf16")):
        cycle = WatchedLifeCycle(warmup, **SETTINGS[f"wire {wire}, overlap"])
        for seed in range(4):
            cycle.train(seed)
        assert cycle.captured_with
        for before, after in zip(cycle.captured_with, cycle.tables(), strict=True):
            assert before is after is not None


@life_cycle.on_a_rank
def test_a_replay_from_elsewhere_is_refused_before_it_runs():
    """Gradients that were not zeroed, masters that were planned anew, weights on the host."""
    options = SETTINGS["wire quantized, overlap"]
    said = []
    for spoil in ("dirty", "load", "offload"):
        cycle = GraphedLifeCycle(**options)
        for seed in range(4):
            cycle.train(seed)
            cycle.save()
        if spoil == "load":
            cycle.load()
        if spoil == "offload":
            cycle.force_sync()
            weights = [bucket.state.weights for bucket in cycle._managed_groups()[0].managed]
            assert weights
            for buffer in (*cycle.ddp.buffers, *cycle.ddp.expert_parallel_buffers):
                buffer.offload_to_cpu(move_params=True, move_grads=False)
        if spoil != "dirty":
            cycle.ddp.zero_grad_buffer()
        with pytest.raises(StateError) as error:
            cycle.iterate()
        said.append(str(error.value))
    dirty, loaded, offloaded = said
    assert "the replay of a CUDA graph: expected zeros, got gradients a step has" in dirty
    assert "expected masters, weights and gradients where they lay" in loaded
    assert "got weights on the host" in offloaded
    for message in (dirty, loaded, offloaded):
        assert "reset_cuda_graph()" in message


# What is looked at before an iteration, without a model


class Wrapper:
    """What a capture asks of Megatron's wrapper."""

    cuda_graph_warmup_steps = 2

    def __init__(self, iteration: int) -> None:
        self.cuda_graph: dict[str, Any] = {"training": None, "validation": None}
        self.iteration = iteration

    def curr_iter(self, _stage: str) -> int:
        return self.iteration


class Graph:
    """A graph, which is told from others by identity."""


def chunk_of(bucket: Any, calls: list[str]) -> Any:
    """Return a model chunk with hooks and one group of one bucket; its gathers are noted."""
    group: Any = object.__new__(GroupedBucketGroup)
    group.managed = (bucket,)
    group.gather_anew = lambda: calls.append("gather_anew")
    group.start_param_sync = lambda **_: calls.append("start_param_sync")
    return SimpleNamespace(
        bucket_groups=[group],
        expert_parallel_bucket_groups=[],
        remove_forward_pre_hook_handles={"a hook": None},
    )


def make_bucket_of_one() -> Any:
    slots = side_by_side([(2, 32, 64)], name="layers.0.fc")
    return make_bucket(make_params(MXFP8, slots), slots, torch.zeros(2 * 32 * 64))


@pytest.mark.parametrize(
    ("training", "iteration", "gathers"),
    [(True, 1, False), (True, 2, True), (False, 1, False), (False, 2, False)],
)
def test_only_a_capture_of_training_gathers_anew(monkeypatch, training, iteration, gathers):
    """A capture of an evaluation would leave weights stale that are read next."""
    monkeypatch.setattr(replay, "original", lambda _: lambda *_: "data")
    calls: list[str] = []
    chunk = chunk_of(make_bucket_of_one(), calls)
    wrapper: Any = Wrapper(iteration)
    assert replay.begin_iteration(wrapper, None, [chunk], training, 1) == "data"
    expected = ["gather_anew", "start_param_sync", "gather_anew"] if gathers else []
    assert calls == expected


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_replay_looks_at_the_buckets_of_all_chunks(monkeypatch, spoiled):
    """Each must hold what it held when the graph was captured."""
    monkeypatch.setattr(replay, "original", lambda _: lambda *_: "data")
    buckets = [make_bucket_of_one(), make_bucket_of_one()]
    chunks = [chunk_of(bucket, []) for bucket in buckets]
    wrapper: Any = Wrapper(iteration=0)
    replay.begin_iteration(wrapper, None, chunks, True, 1)
    wrapper.cuda_graph["training"] = Graph()
    replay.end_iteration(wrapper, "training")  # it was captured
    replay.begin_iteration(wrapper, None, chunks, True, 1)
    buckets[spoiled].state.record(Event.SETTLE)
    with pytest.raises(StateError, match="reset_cuda_graph"):
        replay.begin_iteration(wrapper, None, chunks, True, 1)
