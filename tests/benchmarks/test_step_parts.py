"""Parts of a step: time goes to the innermost, whatever clock is read.

How real optimizers are cut into parts is seen in ``tests/benchmarks/test_step.py``.
"""

from types import SimpleNamespace

import pytest

from benchmarks.step_parts import Parts, instrument


class FakeClock:
    """Goes on only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        now = self.now
        return SimpleNamespace(now=now, ms_since=lambda earlier: now - earlier.now)


@pytest.fixture
def clock():
    return FakeClock()


def work(clock, ms):
    """Return a function that takes its time and returns its argument."""

    def run(value=None):
        clock.now += ms
        return value

    return run


def test_time_belongs_to_the_innermost_part_alone(clock):
    """optimizer: 1, gather: 2, post: 4, gather again: 8, optimizer: 16; outside: 32 and 64."""
    parts = Parts()
    with parts.recorded(clock.mark) as recording:
        clock.now += 32
        with parts.part("optimizer"):
            clock.now += 1
            with parts.part("gather"):
                clock.now += 2
                with parts.part("post"):
                    clock.now += 4
                clock.now += 8
            clock.now += 16
        clock.now += 64
        parts.within("gather", work(clock, 128))()
    assert recording.own_ms() == {"optimizer": 17, "gather": 138, "post": 4}
    assert recording.whole_ms("optimizer") == 31
    assert recording.whole_ms("gather") == 2 + 4 + 8 + 128
    assert recording.whole_ms("absent") == 0


class Group:
    """A bucket group whose gather takes 3 to start, 5 to wait for, and 7 for what follows."""

    def __init__(self, clock, *, late=False):
        self.ddp_config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=late)
        self.param_gather_handle = None
        self.started = work(clock, 3)
        self.arrived = SimpleNamespace(wait=work(clock, 5))
        self._post = work(clock, 7)

    def start_param_sync(self, force_sync=False):
        self.started()
        self.param_gather_handle = self.param_gather_handle or self.arrived

    def finish_param_sync(self):
        self.param_gather_handle.wait()
        self.param_gather_handle = None
        self._post_param_sync()

    def _post_param_sync(self):
        self._post()


def optimizer_of(clock, cost):
    """Return what looks like a distributed optimizer; its methods take 1, 2, 4 times ``cost``."""
    return SimpleNamespace(
        is_stub_optimizer=False,
        optimizer=SimpleNamespace(step=work(clock, 2 * cost)),
        _copy_model_grads_to_main_grads=work(clock, cost),
        _copy_main_params_to_model_params=work(clock, 4 * cost),
        _copy_main_params_to_param_buffer=work(clock, 0),
    )


def step_all(chain):
    """Return a step of a chain of optimizers, as Megatron takes it."""

    def step():
        for one in chain.chained_optimizers:
            one._copy_model_grads_to_main_grads()
        chain.get_grad_norm()
        for one in chain.chained_optimizers:
            one.optimizer.step()
            one._copy_main_params_to_model_params()
        return True, 1.0, None

    return step


def chain_of(clock):
    chain = SimpleNamespace(
        chained_optimizers=[optimizer_of(clock, 1), optimizer_of(clock, 100)],
        get_grad_norm=work(clock, 10_000),
    )
    chain.step = step_all(chain)
    return chain


def chunk_of(groups, expert_groups=()):
    return SimpleNamespace(bucket_groups=groups, expert_parallel_bucket_groups=expert_groups)


def test_all_optimizers_of_a_chain_and_all_bucket_groups_are_seen(clock):
    """Also a gather that a forward pass waits for: only the wait and its end are taken from it."""
    parts, chain, dense, experts = Parts(), chain_of(clock), Group(clock), Group(clock)
    instrument(parts, [chunk_of([dense], [experts])], chain)
    with parts.recorded(clock.mark) as recording:
        chain.step()
        with parts.part("forward_backward"):
            for group in (dense, experts):
                group.start_param_sync()
                group.start_param_sync()  # one that finds it on its way
                group.finish_param_sync()
            clock.now += 0.5
    assert recording.own_ms() == {
        "optimizer": 0,
        "grad_copy": 101,
        "grad_norm": 10_000,
        "inner_step": 202,
        "requantize": 404,
        "gather": 2 * (3 + 3 + 5),
        "post_processing": 14,
        "forward_backward": 0.5,
    }
