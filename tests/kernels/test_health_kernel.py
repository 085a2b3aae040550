"""The launch that measures what experts have lost, without a GPU."""

from importlib.util import find_spec

import pytest
import torch

from moe_optim import ops
from moe_optim.errors import LayoutError
from moe_optim.formats import MXFP8, QuantizedWeight
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.table_entry import TableEntry
from tests.support.launches import interpreted

CPU = torch.device("cpu")


def entry_of(source, **changes):
    target = QuantizedWeight.empty(MXFP8, (1, 32, 32))
    entry = TableEntry(parameter="fc", source=source, target=target, **changes)
    return HealthEntry(entry=entry, rows=torch.arange(1))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_what_the_kernel_finds_is_plain_torchs():
    """Whole weights and shards of them that end inside of blocks, of every format."""
    done = interpreted("tests.kernels.interpreted_health")
    assert done.returncode == 0, done.stderr
    assert "health is plain torch's" in done.stdout


def test_a_table_knows_when_masters_or_planes_lie_elsewhere():
    one = entry_of(torch.zeros(1, 32, 32))
    table = HealthTable.build([one], 1, device=CPU)
    assert not table.has_moved
    one.entry.source.data = torch.ones(1, 32, 32)
    assert table.has_moved
    ops.measure_health(table)
    assert table.amaxes.item() == 1.0


def test_nothing_owned_is_nothing_found():
    table = HealthTable.build([entry_of(torch.zeros(0))], 3, device=CPU)
    ops.measure_health(table)
    assert not table.sums.any() and not table.amaxes.any()


def test_a_shard_that_does_not_run_from_cut_to_cut_is_refused():
    with pytest.raises(LayoutError, match=r"fc: expected a range from one cut to the next"):
        HealthTable.build([entry_of(torch.zeros(100))], 1, device=CPU)
