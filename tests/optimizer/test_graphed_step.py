"""`--optimizer-cuda-graph`: the fused step decides on the device, and is captured once.

There is no graph on a CPU: the same kernels run one by one. What decides when they are captured is
tested apart, with a graph that notes what it is asked for.
"""

import math
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError, NonFiniteError, StateError
from moe_optim.optimizer import chained, factory
from moe_optim.optimizer.chained import GraphedStep
from tests.optimizer.test_nonfinite import NAME, _snapshot
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks
from tests.support.states import life_cycle
from tests.support.states.masters import assert_weights_come_from_masters
from tests.support.training import OVERLAP, Record, assert_same_run, pretrain

GRAPH = "--optimizer-cuda-graph"
FUSED = MoEOptimConfig(format="mxfp8", step="fused")
RUN = ["--train-iters", "4", "--eval-interval", "2", "--clip-grad", "0.5"]


def _train(flags: list[str], config: MoEOptimConfig = FUSED) -> Record:
    return pretrain(flags, config, observe=assert_weights_come_from_masters)


def test_deciding_on_the_device_changes_no_bit():
    """With evaluations, overlapped, and with clipping active, every loss and norm is that of steps
    that are decided on the host."""
    eager, graphed = (run_ranks(2, _train, [*RUN, *flags]) for flags in ([], [GRAPH, *OVERLAP]))
    for rank, (one, other) in enumerate(zip(eager, graphed, strict=True)):
        assert_same_run(other, one, what=f"rank {rank}")


def _train_on_nan(policy: str, first_after: str, *more: str) -> dict[str, Any]:
    """Step five times, the third time on NaN; then step again, save, load what was before it, or
    end with it."""
    found: dict[str, Any] = {}

    def watch(model: list[Any], optimizer: Any) -> None:
        optimizer.policy = policy
        number = 0

        class Watched(GraphedStep):
            def __call__(self) -> Any:
                nonlocal number
                number += 1
                if number == 3:
                    for name, param in model[0].module.named_parameters():
                        if name.endswith(NAME):
                            param.main_grad.view(-1)[7] = torch.nan
                    before = _snapshot(model, optimizer)
                    counts = deepcopy(optimizer.state_dict())
                    result = super().__call__()
                    assert_same_tensors(_snapshot(model, optimizer), before, what="a NaN step")
                    if first_after == "a save":
                        _note(found, optimizer.state_dict)
                    if first_after == "a load":
                        optimizer.load_state_dict(counts)
                    return result
                if number == 4 and first_after == "a step":
                    _note(found, super().__call__)
                    return True, 1.0, None
                result = super().__call__()
                found["steps"] = {group["step"] for group in optimizer.param_groups}
                return result

        chained.GraphedStep = Watched  # which a chain puts in the place of Megatron's wrapper

    flags = ["--train-iters", "3" if first_after == "the end" else "5", *more]
    flags += ["--eval-interval", "1000000", GRAPH, "--no-check-for-nan-in-loss-and-grad"]

    def count(_: list[Any], optimizer: Any) -> None:
        found["steps"] = {group["step"] for group in optimizer.param_groups}

    _note(found, lambda: pretrain(flags, FUSED, after_setup=watch, observe=count))
    return found


@life_cycle.on_a_rank
def test_a_step_over_what_a_failed_load_has_left_is_refused():
    cycle = life_cycle.LifeCycle(step="fused")
    cycle.optimizer.step = GraphedStep(cycle.optimizer)
    with pytest.raises(LayoutError):
        cycle.optimizer.load_state_dict([])
    with pytest.raises(StateError, match="partly replaced"):
        cycle.optimizer.step()


def _note(found: dict[str, Any], act: Any) -> None:
    try:
        act()
    except NonFiniteError as error:
        found["raised"] = str(error)


@pytest.mark.parametrize("first_after", ["a step", "a save"])
def test_a_step_on_nan_moves_nothing_and_the_next_call_says_so(first_after: str):
    """Under ``raise`` whoever comes first after it, a step or a save; and it does not count as a
    step of Adam, so that those after it have the bias corrections they would have without."""
    for found in run_ranks(2, _train_on_nan, "raise", first_after):
        assert "last optimizer step: gradient norms were [nan" in found["raised"]
        assert "No weight has moved" in found["raised"]
        # of five calls one found NaN, and the one that said so after it did not step
        assert found["steps"] == {4 if first_after == "a save" else 3}


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_run_that_ends_with_nan_says_so_before_it_saves(policy: str, tmp_path):
    """Megatron drops the graph before its last save, which would count the step."""
    save = ("--save", str(tmp_path), "--save-interval", "1000")
    for found in run_ranks(2, _train_on_nan, policy, "the end", *save):
        if policy == "raise":
            assert "last optimizer step: gradient norms were [nan" in found["raised"]
        else:
            assert "raised" not in found
            assert found["steps"] == {2}
    saved = [path.name for path in tmp_path.glob("iter_*")]
    assert saved == ([] if policy == "raise" else ["iter_0000003"])


def test_what_a_load_has_put_in_place_is_not_taken_back():
    """The NaN was of a run that is no more: nothing is said of it, and steps count on."""
    for found in run_ranks(2, _train_on_nan, "raise", "a load"):
        assert "raised" not in found
        assert found["steps"] == {4}


def _refuse(config: MoEOptimConfig) -> str:
    try:
        _train([*RUN, GRAPH], config)
    except ConfigError as error:
        return str(error)
    return ""


def _refuse_without_kernels() -> str:
    """A GPU that has none of them, as far as the factory can tell."""
    with patch.object(factory, "_can_be_captured", lambda _: False):
        return _refuse(FUSED)


def test_a_step_in_plain_torch_is_not_captured():
    """It asks the device whether weights move, which no capture can."""
    (said,) = run_ranks(1, _refuse_without_kernels)
    assert said.startswith("moe_optim: --optimizer-cuda-graph on a GPU without kernels: ")


def test_only_kernels_can_be_captured(monkeypatch):
    """All of a GPU's masters must be stepped by them; a CPU runs the same step one by one."""
    parts = [SimpleNamespace(kernels=True), SimpleNamespace(kernels=False)]
    monkeypatch.setattr(factory, "runs_on_kernels", lambda part: part.kernels)
    monkeypatch.setattr(factory, "this_device", lambda: torch.device("cpu"))
    assert factory._can_be_captured(SimpleNamespace(stepping=parts))
    monkeypatch.setattr(factory, "this_device", lambda: torch.device("cuda", 0))
    assert not factory._can_be_captured(SimpleNamespace(stepping=parts))
    assert factory._can_be_captured(SimpleNamespace(stepping=parts[:1]))


# When kernels are captured


@pytest.fixture
def step(monkeypatch):
    """A step of a chain that is nothing but its plans, and what was done with its kernels."""
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replayed")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext(done.append("captured")))
    monkeypatch.setattr(chained, "get_shared_capture_stream", lambda: None)
    monkeypatch.setattr(GraphedStep, "_run_kernels", lambda self: done.append("run"))
    made = GraphedStep(SimpleNamespace())
    made._captures = True
    return made, done


def test_kernels_are_captured_at_the_second_step_of_a_plan_and_replayed_from_then_on(step):
    made, done = step
    expected = {
        "first of a plan": ([1, 1], ["run"]),
        "second": ([1, 1], ["captured", "run", "replayed"]),
        "third": ([1, 1], ["replayed"]),
        "masters have moved": ([2, 1], ["run"]),
        "second of the new plan": ([2, 1], ["captured", "run", "replayed"]),
    }
    for name, (plans, kernels) in expected.items():
        done.clear()
        made._launch(plans)
        assert done == kernels, name


def test_a_rank_without_masters_runs_before_it_captures(step):
    """Its collectives need their communicator, which the first one makes."""
    made, done = step
    made._launch([])
    assert done == ["run"]


def test_sums_over_ranks_are_not_captured(step, monkeypatch):
    """NCCL wants every rank to replay a collective or none, and a rank whose memory has moved
    launches its kernels one by one, alone. So does one whose configuration has changed."""
    made, done = step
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    )
    made._chain = SimpleNamespace(
        stepping=[],
        config=SimpleNamespace(log_num_zeros_in_grad=False),
        largest_norm=math.inf,
        clipped_norms=lambda: [True, False],
        begin_step=lambda: None,
        sum_squares=lambda: done.append("summed") or torch.zeros_like(made._total),
    )
    for kernels in (["run"], ["captured", "run", "replayed"], ["replayed"]):
        done.clear()
        made()
        assert done == ["summed", *kernels]
    made._chain.largest_norm = 3.0  # which the captured kernels compare with
    for kernels in (["run"], ["captured", "run", "replayed"]):
        done.clear()
        made()
        assert done == ["summed", *kernels]
    made._chain.clipped_norms = lambda: [True, True]
    done.clear()
    made()
    assert done == ["summed", "run"]
