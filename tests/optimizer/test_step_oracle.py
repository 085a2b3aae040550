"""What ranks do to their shards together is what one process does to whole weights, to the bit."""

from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.formats import BlockScaledFormat, get_format
from moe_optim.formats.reference import quantize
from moe_optim.weights.grouped_weight import GroupedWeight
from tests.support.ranks import run_ranks
from tests.support.steps import adam_oracle
from tests.support.steps.adam_oracle import assemble, assert_steps_are_adams, norm_of
from tests.support.steps.step_trace import Trace, owned_shards, trace_steps, whole_weights
from tests.support.training import pretrain

STEPS = 10
FLAGS = ["--train-iters", f"{STEPS}", "--eval-interval", "1000000", *adam_oracle.FLAGS]
FLAGS += ["--overlap-grad-reduce", "--ddp-bucket-size", "20000"]  # a bucket a weight of experts
OVERLAP = ["--overlap-param-gather"]


def _trace(flags: list[str], config: MoEOptimConfig) -> Trace:
    traces: list[Trace] = []

    def finish(model: list[Any], _optimizer: Any) -> Trace:
        model[0].start_param_sync(force_sync=True)
        traces[0].weights = whole_weights(model)
        return traces[0]

    def start(model: list[Any], optimizer: Any) -> None:
        add_outliers(optimizer)
        traces.append(trace_steps(model, optimizer))

    return pretrain([*FLAGS, *flags], config, after_setup=start, observe=finish).extra


def add_outliers(optimizer: Any) -> None:
    """Make some masters large, so that parts of a block differ in the scale they would take."""
    for param, master, _, _ in owned_shards(optimizer):
        if isinstance(param, GroupedWeight):
            master.data[::701] *= 16
    for part in optimizer.chained_optimizers:
        part.refresh_weights()


def assert_settings_are_felt(traces: list[Trace]) -> None:
    """Gradients are clipped by the norm of all of them, rates follow a cosine, weights decay."""
    for number in range(1, STEPS + 1):
        (norm,) = {trace.steps[number - 1].grad_norm for trace in traces}
        assert norm == pytest.approx(norm_of(traces, number), rel=1e-6)
        assert norm > adam_oracle.CLIP_GRAD
    steps = [step for trace in traces for step in trace.steps]
    assert len({rate for step in steps for rate in step.lr.values()}) == STEPS
    decays = {decay for step in steps for decay in step.weight_decay.values()}
    assert decays == {0.0, 0.1}  # norms do not decay


@pytest.mark.parametrize(
    ("format", "wire", "overlap"),
    [
        ("mxfp8", "quantized", OVERLAP),
        pytest.param("mxfp8", "bf16", [], marks=pytest.mark.extended),
        pytest.param("mxfp8_2d", "quantized", [], marks=pytest.mark.extended),
        pytest.param("nvfp4", "quantized", [], marks=pytest.mark.extended),
        pytest.param("nvfp4", "bf16", OVERLAP, marks=pytest.mark.extended),
        pytest.param("fp8_block", "quantized", OVERLAP, marks=pytest.mark.extended),
        pytest.param("fp8_block_fp32", "bf16", OVERLAP, marks=pytest.mark.extended),
        ("int4", "quantized", OVERLAP),
        pytest.param("mxfp4", "bf16", [], marks=pytest.mark.extended),
    ],
    ids=lambda value: ("overlap" if value else "no overlap") if isinstance(value, list) else value,
)
def test_ten_steps_are_those_of_one_process(format: str, wire: str, overlap: list[str]):
    """Given reduced gradients and their norm: masters, moments and every byte of every weight."""
    traces = run_ranks(2, _trace, overlap, MoEOptimConfig(format=format, wire=wire))
    assert_settings_are_felt(traces)
    assert_steps_are_adams(traces, get_format(format))


@pytest.mark.parametrize(
    "format",
    [
        pytest.param("mxfp8", marks=pytest.mark.extended),
        "nvfp4",
        pytest.param("mxfp8_2d", marks=pytest.mark.extended),
        pytest.param("fp8_block", marks=pytest.mark.extended),
        pytest.param("fp8_block_fp32", marks=pytest.mark.extended),
        pytest.param("nvfp4_rows", marks=pytest.mark.extended),
    ],
)
def test_ten_steps_are_those_of_one_process_where_shards_cut_blocks(format: str):
    """On 3 ranks no rank holds the whole of some blocks, or of some experts."""
    flags = ["--global-batch-size", "6", *OVERLAP]
    traces = run_ranks(3, _trace, flags, MoEOptimConfig(format=format, layout="stock"))
    assert_ranks_need_each_other(traces, get_format(format))
    assert_settings_are_felt(traces)
    assert_steps_are_adams(traces, get_format(format))


def assert_ranks_need_each_other(traces: list[Trace], format: BlockScaledFormat) -> None:
    """A rank that knew its own shards alone would quantize them otherwise."""
    shards = [trace.masters for trace in traces]
    differs = []
    for trace in traces:
        for name, shard in trace.masters.items():
            if ".experts." in name:
                known = assemble(traces, shards, name)
                owned = slice(trace.starts[name], trace.starts[name] + shard.numel())
                expected = _codes(known, format)[owned]
                known.view(-1)[: owned.start] = known.view(-1)[owned.stop :] = 0
                differs.append(not torch.equal(_codes(known, format)[owned], expected))
    assert any(differs)


def _codes(master: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """Return the data byte of each element, in a direction whose blocks lie on several rows."""
    quantized = quantize(master, format)
    data = quantized.rowwise_data if format.is_2d else quantized.columnwise_data
    return data.reshape(-1).repeat_interleave(format.elements_per_byte)
