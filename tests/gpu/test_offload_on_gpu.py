"""States and weights on the host, seen from a GPU: the same bits, and the memory is free."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.step import DETERMINISTIC_ENVIRONMENT
from moe_optim.buckets.offload import ParamData
from moe_optim.formats import FORMATS
from moe_optim.kernels import staging
from moe_optim.kernels.host_memory import HostMemory
from moe_optim.optimizer.host_states import HostStates
from moe_optim.weights.storage import PortableStorage
from moe_optim.weights.te.recipe import import_error
from tests.gpu.test_coexistence_on_gpu import LOCAL, OVERLAP, SMALL
from tests.gpu.test_step_on_gpu import (
    DTYPES,
    assert_a_graph_takes_the_steps,
    set_number,
    weights_of,
)
from tests.support.bytes import assert_bytes_equal, assert_values_equal
from tests.support.inputs import wide_range_weights
from tests.support.steps.launches import assert_neither_allocates_nor_waits
from tests.support.steps.stepping import STATES, Stepping, Weight, gradients_of
from tests.support.training_runs.side_runs import EAGER, Machine, Run

pytestmark = pytest.mark.gpu
NEEDS_TE = pytest.mark.skipif(import_error() is not None, reason="needs Transformer Engine")
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


def test_memory_of_the_host_is_a_tensor_of_the_gpu():
    """Both sides see what the other writes, and nothing is allocated on the GPU."""
    before = torch.cuda.memory_allocated()
    one = HostMemory(torch.device("cuda", 0)).take((3, 5000), torch.float32)
    assert torch.cuda.memory_allocated() == before
    assert one.on_host.is_pinned() and one.on_device.is_cuda
    values = torch.arange(15000.0, device="cuda").view(3, 5000)
    one.on_device.copy_(values)
    one.on_device.add_(1)
    torch.cuda.synchronize()
    assert torch.equal(one.on_host, values.cpu() + 1)
    one.on_host.mul_(2)
    assert torch.equal(one.on_device.clone(), 2 * (values + 1))
    assert torch.equal(one.on_device.cpu(), one.on_host)


def test_what_is_called_a_tensor_of_the_host_is_written_by_nobody():
    """A step may return long before its last states have arrived at home."""
    master = torch.zeros(4096, device="cuda")
    states = HostStates([master], 1.0)
    torch.cuda._sleep(2_000_000_000)  # about a second
    master.fill_(7)
    states.call_them_the_hosts(SimpleNamespace(state={}))
    assert master.device.type == "cpu"
    assert (master == 7).all()


# Steps

LARGE = [  # several chunks each, of which the last is not full
    Weight(master=wide_range_weights(5, 512, 1024, seed=1), format=FORMATS["fp8_block"]),
    Weight(master=wide_range_weights(5, 512, 1024, seed=2), format=FORMATS["nvfp4"], group=1),
    Weight(master=wide_range_weights(3_000_000, seed=3)),
]


@pytest.fixture
def in_small_chunks(monkeypatch):
    monkeypatch.setattr(staging, "SMALLEST", 4096)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 12 << 16)


def assert_same_steps(weights, steps, **options):
    """Take steps with states on the host and without, one after the other."""
    runs = [Stepping(weights, device="cuda", on_host=there, **options) for there in (True, False)]
    assert all(table.chunks and not table.remainder for table in runs[0].tables if table.states)
    given = [[one.cuda() for one in gradients_of(weights, 100 * n)] for n in range(1, steps + 1)]
    for run in runs:
        for number, gradients in enumerate(given, 1):
            set_number(run, number)
            run.give(gradients)
            run.update()
        run.assert_weights_follow()
    for index in range(len(weights)):
        for got, want, name in zip(*(run.states(index) for run in runs), STATES, strict=True):
            assert_values_equal(got, want, what=f"fc{index} {name}")


@EVERY_FORMAT
@pytest.mark.parametrize("moments", DTYPES.values(), ids=DTYPES)
def test_steps_are_those_of_states_on_the_gpu(format, moments, in_small_chunks):
    """Wherever shards meet, special values among them: masters, moments, weights and buffers."""
    assert_same_steps(weights_of(format), 3, moments=moments, clips=(1.0, 0.37))


def test_chunks_on_each_others_heels_do_not_mix(in_small_chunks):
    """Over many turns of the slots, step after step."""
    assert_same_steps(LARGE, 8)


def test_a_step_with_chunks_allocates_nothing_and_does_not_wait(in_small_chunks):
    (table,) = Stepping(LARGE, device="cuda", on_host=True).tables
    assert len(table.chunks) > 2 * staging.SLOTS
    assert_neither_allocates_nor_waits(lambda: table.launch())


def test_a_captured_graph_moves_chunks_too(in_small_chunks):
    assert_a_graph_takes_the_steps(LARGE, on_host=True)


# Weights


@EVERY_FORMAT
def test_param_data_frees_its_memory_and_brings_back_every_byte(format):
    storages = [PortableStorage(format, (4, 512, 1024), device="cuda") for _ in range(3)]
    for seed, storage in enumerate(storages):
        storage.write(wide_range_weights(4, 512, 1024, seed=seed))
    before = [buffer.clone() for one in storages for buffer in one.quantized.buffers().values()]
    data = ParamData(storages)
    size, here = data.storage().size(), torch.cuda.memory_allocated()
    on_host = data.data.cpu().pin_memory()
    data.storage().resize_(0)
    freed = here - torch.cuda.memory_allocated()
    assert size <= freed < size + 512 * 3 * len(before)  # torch allocates multiples of 512 bytes
    data.storage().resize_(size)
    data.copy_(on_host, non_blocking=True)
    after = [buffer for one in storages for buffer in one.quantized.buffers().values()]
    for buffer, old in zip(after, before, strict=True):
        assert_bytes_equal(buffer, old)


# Training

WIDE = SMALL | {"--num-experts": 32, "--train-iters": 5}
STATES_BYTES = 12
RUNS = {
    "on the GPU": Run(WIDE, plugin=("format=fp8_block",)),
    "half": Run(WIDE, plugin=("format=fp8_block", "offload_states=0.5")),
    "all": Run(WIDE, plugin=("format=fp8_block", "offload_states=1")),
    "all, overlapped": Run(WIDE | OVERLAP, plugin=("format=fp8_block", "offload_states=1")),
    "all, as a graph": Run(
        WIDE | {"--optimizer-cuda-graph": True}, plugin=("format=fp8_block", "offload_states=1")
    ),
    "sent away": Run(WIDE, plugin=("format=fp8_block",), switches=("send-away",)),
    "sent away, half": Run(
        WIDE, plugin=("format=fp8_block", "offload_states=0.5"), switches=("send-away",)
    ),
}
BF16 = WIDE | {"--fp8-param-gather": False}
FLAGS = {"--use-precision-aware-optimizer": True, "--optimizer-cpu-offload": True}
ALL_FLAGGED = "bf16, by Megatron's flags"
BF16_RUNS = {
    "bf16": (0, Run(BF16, plugin=())),
    ALL_FLAGGED: (1, Run(BF16 | FLAGS, plugin=())),
    "bf16, half by Megatron's flags": (
        0.5,
        Run(BF16 | FLAGS | {"--optimizer-offload-fraction": 0.5}, plugin=()),
    ),
}
"""Name -> the part of all states that is on the host, and the run."""
PORTABLE = {
    "portable": Run(WIDE | LOCAL, plugin=("format=nvfp4",)),
    "portable, all": Run(WIDE | LOCAL, plugin=("format=nvfp4", "offload_states=1")),
    "portable, sent away": Run(
        WIDE | LOCAL, plugin=("format=nvfp4", "offload_states=1"), switches=("send-away",)
    ),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory):
    """Return the report of each run."""
    logs = os.environ.get("SIDE_RUN_LOGS")
    folder = Path(logs) / "offload" if logs else tmp_path_factory.mktemp("offload")
    environment = DETERMINISTIC_ENVIRONMENT | EAGER | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = Machine(folder, 5, environment=environment).train(
        RUNS | PORTABLE | {name: run for name, (_, run) in BF16_RUNS.items()}
    )
    return {name: report for name, (report,) in done.items()}


@NEEDS_TE
@pytest.mark.parametrize("name", [*RUNS, *PORTABLE])
def test_training_gives_the_losses_of_states_on_the_gpu(reports, name: str):
    """To the bit, and so it does where everything is sent to the host and back between steps."""
    report, without = reports[name], reports["on the GPU" if name in RUNS else "portable"]
    assert (report.error, without.error) == (None, None)
    assert report.managed == without.managed > 0
    assert len(set(report.losses)) == WIDE["--train-iters"]
    assert report.losses == without.losses
    assert (report.graphs > 0) == ("as a graph" in name)


@NEEDS_TE
@pytest.mark.parametrize("name", BF16_RUNS)
def test_megatrons_flags_for_bf16_weights_are_the_knob(reports, name: str):
    """As scripts of RL stacks give them: losses to the bit, states of all weights or of half."""
    report, without = reports[name], reports["bf16"]
    assert (report.error, without.error) == (None, None)
    assert report.losses == without.losses
    part, _ = BF16_RUNS[name]
    assert 0.9 * part <= report.on_host / reports[ALL_FLAGGED].on_host <= part


@NEEDS_TE
@pytest.mark.parametrize("name", ["half", "all", "all, overlapped"])
def test_what_is_on_the_host_takes_no_memory_of_the_gpu(reports, name: str):
    """But for the stage: twelve bytes an element, in chunks of at most so many."""
    report, without = reports[name], reports["on the GPU"]
    freed = without.allocated - report.allocated
    print(f"{name}: {report.on_host} elements on the host, {freed} bytes freed")
    stage = staging.SLOTS * staging.CHUNK_BYTES
    assert STATES_BYTES * report.on_host - stage - (8 << 20) <= freed
    assert freed <= STATES_BYTES * report.on_host + (8 << 20)


@NEEDS_TE
def test_weights_and_states_that_are_sent_away_free_their_memory(reports):
    """By Megatron's calls and by verl's: fp8_block weights with both copies (2 bytes an element at
    least), fp32 gradients and states; where states are on the host already, by so much less."""
    freed = {name: reports[name].freed for name in ("sent away", "sent away, half")}
    print(freed)
    for name, counts in freed.items():
        assert len(counts) == WIDE["--train-iters"], name
    (first, *rest), (half, *_) = freed.values()
    assert all(abs(one - first) < 0.02 * first for one in rest)
    spared = STATES_BYTES * reports["sent away, half"].on_host
    assert abs(first - half - spared) < 0.05 * spared
