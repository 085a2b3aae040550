"""The launch that measures what experts have lost, without a GPU."""

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.formats import FORMATS, MXFP8, QuantizedWeight
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.table_entry import TableEntry
from tests.support.ptx.launches import plan_kernels
from tests.support.training_runs.health import assert_same_health, masters_of, measure

CPU = torch.device("cpu")
WHOLE, THIRDS = (0.0, 1.0), (0.0, 0.36, 0.79, 1.0)


EVERY_TIME = {("nvfp4", "whole"), ("int4", "the middle")}
"""Packed elements and an amax, and rows."""


def entry_of(source, **changes):
    target = QuantizedWeight.empty(MXFP8, (1, 32, 32))
    entry = TableEntry(parameter="fc", source=source, target=target, **changes)
    return HealthEntry(entry=entry, rows=torch.arange(1))


@pytest.mark.parametrize(
    ("format", "cuts", "shard"),
    [
        pytest.param(
            *(format, cuts, shard),
            id=f"{name}, {part}",
            marks=[pytest.mark.extended] * ((name, part) not in EVERY_TIME),
        )
        for name, format in FORMATS.items()
        for part, cuts, shard in (
            ("the middle", THIRDS, 1),
            ("whole", WHOLE, 0),
            ("the end", THIRDS, 2),
        )
    ],
)
def test_what_the_kernel_finds_is_plain_torchs(format, cuts, shard, launches):
    """Of shards that end inside of blocks, and of whole weights, which have a whole tile."""
    masters = masters_of(format)
    got = measure(format, masters, cuts=cuts, shard=shard)
    whole_and_cut = 1 + (cuts is WHOLE)
    assert launches == 2 * [*whole_and_cut * ["measure_kernel"], "add_parts_kernel"]
    want = measure(format, masters, cuts=cuts, shard=shard, backend="reference")
    assert_same_health(got, want, f"{format.name}, shard {shard}")


def test_a_shard_that_does_not_run_from_cut_to_cut_is_refused():
    with pytest.raises(LayoutError, match=r"fc: expected a range from one cut to the next"):
        HealthTable.build([entry_of(torch.zeros(100))], 1, device=CPU)


@pytest.mark.parametrize("buffer", ["rowwise_data", "rowwise_scale", "global_amax"])
def test_a_buffer_that_moved_is_noticed(buffer, monkeypatch):
    """Each has memory of its own, which may come back elsewhere after it was given away."""
    plan_kernels(monkeypatch)
    target = QuantizedWeight.empty(FORMATS["nvfp4"], (2, 64, 128))
    entry = TableEntry(parameter="fc", source=torch.zeros(2, 64, 128), target=target)
    table = HealthTable.build([HealthEntry(entry=entry, rows=torch.arange(2))], 2, device=CPU)
    assert not table.has_moved
    moved = getattr(target, buffer)
    moved.set_(moved.clone())
    assert table.has_moved
