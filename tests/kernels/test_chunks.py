"""Kernels over chunks of states, without a GPU: every bit is that of states that stay."""

import pytest

from moe_optim.formats import QuantizedWeight
from moe_optim.kernels import staging
from tests.kernels.conftest import ONE_OF_EACH_KERNEL
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import wide_range_weights
from tests.support.steps.stepping import STATES, Stepping, Weight, gradients_of

BOUNDS = [
    pytest.param((), id="whole", marks=pytest.mark.extended),
    pytest.param((32 * 128 + 38 * 128 + 6,), id="inside a block row"),
]


@pytest.mark.parametrize("bounds", BOUNDS)
@ONE_OF_EACH_KERNEL
def test_chunks_leave_no_trace(format, bounds, launches, monkeypatch):
    """Masters, moments, buffers and dense weights after two steps, shards of ranks included."""
    monkeypatch.setattr(staging, "SMALLEST", 1000)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 12 * 8192)
    weights = [
        Weight(master=wide_range_weights(3, 64, 128, seed=1), format=format, bounds=bounds),
        Weight(master=wide_range_weights(9000, seed=2), bounds=tuple(n // 5 * 2 for n in bounds)),
        Weight(master=wide_range_weights(1, 128, 128, seed=3), format=format, bounds=bounds),
    ]
    runs = [Stepping(weights, on_host=there) for there in (True, False)]
    assert all(table.chunks and not table.remainder for table in runs[0].tables)
    assert sum(len(table.chunks) for table in runs[0].tables) > staging.SLOTS
    for seed in (0, 100):
        for run in runs:
            run.give(gradients_of(weights, seed))
            run.update()
    assert launches
    for index in range(len(weights)):
        for got, want, name in zip(*(run.states(index) for run in runs), STATES, strict=True):
            assert_values_equal(got, want, what=f"weight {index} {name}")
        ours, theirs = (run.targets[index] for run in runs)
        if not isinstance(ours, QuantizedWeight):
            assert_values_equal(ours, theirs, what=f"weight {index}")
            continue
        for name, buffer in ours.buffers().items():
            assert_bytes_equal(buffer, theirs.buffers()[name], what=f"weight {index} {name}")
