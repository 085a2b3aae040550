"""A sample is reported once its copy has arrived, to every writer there is, with warnings."""

import logging
from types import SimpleNamespace

import pytest
import torch

from moe_optim.formats.health_figures import NUM_SUMS, Sum
from moe_optim.health import monitor
from moe_optim.health.monitor import MOST_WARNINGS, HealthMonitor
from moe_optim.health.rows import ExpertName, ExpertRows


class Event:
    """A CUDA event that has passed when it is told to."""

    def __init__(self) -> None:
        self.passed, self.waited = False, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waited = True


def sums_of(num_experts, saturated=0):
    sums = torch.zeros(num_experts, NUM_SUMS, dtype=torch.float64)
    sums[:, [Sum.SQUARES, Sum.ELEMENTS, Sum.BLOCKS]] = 100.0
    sums[:, len(Sum)] = 1.0
    sums[:, Sum.SATURATED] = saturated
    return sums


@pytest.fixture
def sampled(monkeypatch):
    """A monitor with a sample of two experts on its way to the host, and what it writes."""
    written = []
    monkeypatch.setattr(monitor, "write", lambda layers, iteration: written.append(iteration))
    found = HealthMonitor(SimpleNamespace(stepping=[], model_chunks=[]), 10)
    found._rows = ExpertRows(ExpertName("layers.0.fc1", expert, "mxfp8") for expert in range(2))
    found._on_host = sums_of(2), torch.ones(2), torch.empty(0)
    event = Event()
    found._sample = monitor._Sample(10, event)
    return found, event, written


def test_a_step_does_not_wait_for_what_has_not_arrived(sampled):
    found, event, written = sampled
    found.before_step()
    assert written == [] and not event.waited and found.latest == ()
    event.passed = True
    found.before_step()
    found.before_step()
    assert written == [10]  # once
    assert found.latest[0].experts == (0, 1)


def test_a_save_waits_for_it(sampled):
    found, event, written = sampled
    found.before_save()
    assert written == [10] and event.waited


def test_warnings_name_layer_and_expert_and_are_not_many(sampled, caplog, monkeypatch):
    found, event, _ = sampled
    monkeypatch.setattr(
        monitor, "log_single_rank", lambda logger, *args: logger.log(*args)
    )  # no process group here
    found._rows = ExpertRows(ExpertName("layers.7.fc2", expert, "mxfp8") for expert in range(20))
    found._on_host = sums_of(20, saturated=5), torch.ones(20), torch.empty(0)
    with caplog.at_level(logging.WARNING):
        found.before_save()
    assert len(caplog.messages) == MOST_WARNINGS + 1
    first = "moe_optim: health at iteration 10: layers.7.fc2, expert 0: saturated is 0.05, above"
    assert caplog.messages[0].startswith(first)
    assert caplog.messages[-1].endswith(f"and {20 - MOST_WARNINGS} more")
