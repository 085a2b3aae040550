"""CUDA graphs of whole iterations: what a replay did is known, or the replay does not run."""

from typing import Any

import pytest

from moe_optim.errors import StateError
from tests.support import life_cycle
from tests.support.life_cycle import LifeCycle
from tests.support.ranks import run_ranks

extended = pytest.mark.extended
SETTINGS = {
    "wire quantized, overlap": {"wire": "quantized", "overlap": True},
    "wire bf16, overlap": {"wire": "bf16", "overlap": True},
    "wire quantized": {"wire": "quantized", "overlap": False, "format": "nvfp4"},
    "wire bf16": {"wire": "bf16", "overlap": False},
}


class GraphedLifeCycle(LifeCycle):
    """Micro-batches, their reduction included, run eagerly twice, are captured, then replayed."""

    def __init__(self, **options: Any) -> None:
        from tests.support import emulated_graphs

        super().__init__(**options)
        self.seed = 0
        self.iterate = emulated_graphs.wrap(self._iterate, [self.ddp], warmup=2)
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


def _train_with_evaluations(options: dict[str, Any]) -> None:
    life_cycle.initialize()
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


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=extended)])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_replayed_iterations_are_those_of_plain_torch(options, ranks):
    """Weights, gradients and outputs after every call, with evaluations and saves between them."""
    run_ranks(ranks, _train_with_evaluations, options)


def _refusals(options: dict[str, Any]) -> list[str]:
    life_cycle.initialize()
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
    return said


def test_a_replay_from_elsewhere_is_refused_before_it_runs():
    """Gradients that were not zeroed, masters that were planned anew, weights on the host."""
    ((dirty, loaded, offloaded),) = run_ranks(1, _refusals, SETTINGS["wire quantized, overlap"])
    assert "the replay of a CUDA graph: expected zeros, got gradients a step has" in dirty
    assert "expected masters, weights and gradients where they lay" in loaded
    assert "got weights on the host" in offloaded
    for message in (dirty, loaded, offloaded):
        assert "reset_cuda_graph()" in message
