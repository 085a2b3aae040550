"""One launch measures every expert on a GPU as plain torch does, rounding included."""

import json
from pathlib import Path

import pytest
import torch

from moe_optim import ops
from moe_optim.commands.cli import main as cli
from moe_optim.commands.train.events import read_events
from moe_optim.formats import FORMATS, QuantizedWeight
from moe_optim.kernels.health import HealthEntry, HealthTable
from moe_optim.kernels.table_entry import TableEntry
from tests.support.bytes import assert_bytes_equal
from tests.support.gpu_sharing import places
from tests.support.inputs import normal_weights, wide_range_weights
from tests.support.training_runs.health import assert_same_health, masters_of, measure

pytestmark = pytest.mark.gpu

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
QUARTERS = (0.0, 0.21, 0.5, 0.83, 1.0)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shard", [None, 0, 1, 2, 3])
def test_health_is_plain_torchs(format, shard):
    """Of whole weights, and of shards that end inside of blocks: counts and maxima to the bit."""
    masters = [
        *masters_of(format, seed=3),
        normal_weights(2, 256, 512, seed=4),
        wide_range_weights(1, 512, 384, seed=5),
    ]
    cut = {} if shard is None else {"cuts": QUARTERS, "shard": shard}
    want = measure(format, masters, backend="reference", **cut)
    got = measure(format, masters, device="cuda", **cut)
    assert_same_health(got, want, format.name)


def test_training_is_looked_at_without_being_waited_for(tmp_path):
    """Every fifth iteration of the quickstart, with figures that freshly trained MXFP8 has."""
    knobs = ["--set", "moe_optim.format=mxfp8_2d", "moe_optim.health_interval=5"]
    flags = ["--train-iters", "20", "--eval-interval", "10", "--save-interval", "20"]
    out = tmp_path / "run"
    command = ["train", str(RECIPE), "--out", str(out), "--ranks", "1", *knobs, "--", *flags]
    with places(1):
        assert cli.main(command) == 0
    events = read_events(out / "tensorboard", tensors="moe_optim/")
    errors = events.tensors["moe_optim/layers.1.fc2/error/by_expert"]
    assert [iteration for iteration, _ in errors] == [5, 10, 15, 20]  # the save tells the last
    assert all(values.shape == (8,) for _, values in errors)
    assert all(((values > 0.02) & (values < 0.03)).all() for _, values in errors)
    assert {p.value for p in events.scalars["moe_optim/layers.0.fc1/saturated"]} == {0.0}
    assert "CPU" not in json.loads((out / "model.json").read_text())["environment"]["device"]


def test_a_pass_gives_the_same_bits_again():
    """Programs write parts of their own, which are added in one order."""
    masters = [wide_range_weights(1, 2048, 1536, seed=6)]
    sums, _ = measure(FORMATS["mxfp8_2d"], masters, device="cuda")
    for _ in range(10):
        again, _ = measure(FORMATS["mxfp8_2d"], masters, device="cuda")
        assert_bytes_equal(again, sums, what="sums")


def test_a_pass_launches_twice_and_waits_for_nothing():
    """A CUDA graph can capture it, which refuses what waits; replays see masters of later steps."""
    shape = (4, 256, 256)
    source = torch.zeros(shape, device="cuda")
    buffers = QuantizedWeight.empty(FORMATS["nvfp4"], shape, device="cuda")
    entry = TableEntry(parameter="fc", source=source, target=buffers)
    one = HealthEntry(entry=entry, rows=torch.arange(4))
    table = HealthTable.build([one], 4, device=source.device)
    table.launch()
    assert len(table.kernels) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.launch()
    source.copy_(normal_weights(*shape).cuda())
    ops.quantize(source, FORMATS["nvfp4"], out=buffers)
    graph.replay()
    found = table.sums.cpu().clone(), table.amaxes.cpu().clone()
    again = HealthTable.build([one], 4, device=source.device, backend="reference")
    again.launch()
    assert_same_health(found, (again.sums.cpu(), again.amaxes.cpu()), "replayed")
