"""``python -m benchmarks muon``: its rows, and the sums that they are compared with."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as benchmark
from benchmarks import timing as stopwatch
from benchmarks.muon import command, floors, iteration, step
from benchmarks.muon.cases import (
    QWEN3,
    SMALL,
    Experts,
    fewest_operations,
    plain_operations,
    settings_of,
)
from benchmarks.muon.gather import planned_bytes
from benchmarks.muon.host import workspace_bytes
from moe_optim.commands.cli import main as cli
from moe_optim.formats import FORMATS, FP8_BLOCK
from moe_optim.optimizer.muon_step import chunk_numel

pytest.importorskip("emerging_optimizers")
FEW = Experts(count=2, hidden=128, ffn=128)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that runs the command, quickly, and returns the report it wrote."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(stopwatch, "WARM_UP", 0)
    monkeypatch.setattr(stopwatch, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(floors, "PRODUCT_SIDE", {"cpu": 64})
    monkeypatch.setattr(command, "SMALL", FEW)
    monkeypatch.setenv("COLUMNS", "250")

    def run(*options):
        path = tmp_path / "report.json"
        words = ["muon", "--small", "--repeat", "1", *options, "--json", str(path)]
        assert benchmark.main(words) == 0
        return json.loads(path.read_text())

    return run


def test_every_way_of_iterating_is_timed_beside_one_matrix_at_a_time(measure, monkeypatch):
    """bf16 has 8 bits of mantissa, and its iterations are as far from fp64 as stock's."""
    few = {way: iteration.WAYS[way] for way in ("torch.baddbmm, bf16", "plug-in, bf16")}
    monkeypatch.setattr(iteration, "WAYS", few)
    report = measure("--case", "apart", "together")
    ways = ["emerging-optimizers, one at a time", *few]
    assert [(row["case"], row["way"], row["matrices"]) for row in report["rows"]] == [
        *(("apart", way, 6) for way in ways),
        *(("together", way, 4) for way in ways),
    ]
    assert report["product_tflop_per_s"] > 0
    for row in report["rows"]:
        assert row["parameters"] == 2 * 3 * 128 * 128
        assert 0 < row["distance"] < 0.03
        assert row["floor_ms"] >= 0
    assert [row["of_stock"] for row in report["rows"] if row["way"] == ways[0]] == [1, 1]


def test_a_whole_step_is_timed_with_its_parts_and_beside_stock(measure):
    report = measure("--case", "step", "--format", "fp8_block", "bf16")
    parts = ["whole step", "momentum", "pack", "iteration", "update and encoding"]
    assert [(row["way"], row["format"], row["work"]) for row in report["rows"]] == [
        ("stock", None, "step, one matrix at a time"),
        ("stock", "bf16", "cast of the masters"),
        ("stock", "bf16", "whole step"),
        *(("plug-in", "fp8_block", part) for part in parts),
        *(("plug-in", "bf16", part) for part in parts),
    ]
    for row in report["rows"]:
        assert (row["of_stock"] is None) == ((row["way"], row["work"]) != ("plug-in", "whole step"))
        assert (row["tflop_per_s"] is None) == (row["work"] != "iteration")


def test_host_times_are_of_as_many_parameters_as_weights(measure):
    report = measure("--case", "host")
    assert [(row["way"], row["matrices"]) for row in report["rows"]] == [
        ("stock", 12),
        ("plug-in", 12),
        ("stock", 48),
        ("plug-in", 48),
    ]
    for row in report["rows"]:
        assert row["host_ms"] > 0
        assert row["ms"] is None


def test_bytes_gathered_are_those_of_the_layout(measure):
    report = measure("--case", "gather", "--format", "fp8_block", "nvfp4")
    found = {(row["data_parallel"], row["way"], row["format"]): row for row in report["rows"]}
    for ranks in (2, 8):
        assert found[ranks, "stock", "bf16"]["bytes_per_parameter"] == 2
        of_block = found[ranks, "plug-in", "fp8_block"]["bytes_per_parameter"]
        assert of_block == pytest.approx(1 + 4 / 128**2, abs=1e-4)


@pytest.mark.parametrize("format", [None, *FORMATS.values()])
@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_no_padding_is_gathered_of_experts_that_ranks_share_evenly(format, ranks):
    experts = QWEN3 if format is None else replace(QWEN3, count=32)
    per_element = (
        2
        if format is None
        else format.gathered_bytes_per_element + (4 / experts.parameters) * format.has_global_amax
    )
    nbytes = planned_bytes(experts, format, ranks)
    assert nbytes / (8 * experts.parameters) == pytest.approx(float(per_element), rel=1e-3)


# Steps


@pytest.mark.parametrize("format", [None, FP8_BLOCK])
def test_parts_run_one_after_another_are_a_launch(format):
    """Recording takes part in nothing: both give the same bytes, and every call is in one part."""
    settings = settings_of("auto", apart=True)
    states = [step.States.draw(FEW, "cpu") for _ in range(2)]
    launched, in_parts = (
        step.FusedStep.build(FEW.weights(apart=True), one, settings, format) for one in states
    )
    launched.table.launch()
    for _, plan in in_parts.parts:
        plan.launch()
    for one, other in zip(states[0].masters, states[1].masters, strict=True):
        assert torch.equal(one, other)
    calls = [call for _, plan in in_parts.parts for call in plan.calls]
    table = in_parts.table
    own = [call for chunk in table.chunks for call in chunk.calls]
    assert len(calls) == len(table.momentum.calls) + len(own) + len(table.updates.finish.calls)


def test_the_fused_step_is_stocks_within_rounding_of_the_iteration():
    """The compared steps do the same work: updates differ by what bf16 rounds."""
    first = step.States.draw(FEW, "cpu")
    second, before = first.copy(), first.copy()
    step.stock_step(FEW, first)()
    settings = settings_of("auto", apart=True)
    fused = step.FusedStep.build(FEW.weights(apart=True), second, settings, None)
    fused.table.launch()
    for ours, stock, old in zip(second.masters, first.masters, before.masters, strict=True):
        change = (stock - old).norm()
        assert change > 0
        assert (ours - stock).norm() < 0.02 * change


# Sums


def test_operations_are_counted_product_by_product():
    """Of 3 matrices [4, 6] over 5 steps: X X^T, A A and B X, without and with symmetry."""
    batches = [(3, 4, 6), (3, 6, 4)]
    gram, square, apply = 2 * 4 * 4 * 6, 2 * 4**3, 2 * 4 * 4 * 6
    assert plain_operations(batches, 5) == 6 * 5 * (gram + square + apply)
    assert fewest_operations(batches, 5, "auto") == 6 * 5 * (gram // 2 + square // 2 + apply)
    # Q begins twice; 5 polynomials, 3 times two products for the Gram matrix, 3 for Q
    with_gram = 2 * (gram // 2 + apply) + (5 + 6 + 3) * square // 2
    assert fewest_operations(batches, 5, "gram") == 6 * with_gram
    # it begins a third time at the sixth step
    of_six = 3 * (gram // 2 + apply) + (6 + 6 + 3) * square // 2
    assert fewest_operations(batches, 6, "gram") == 6 * of_six
    assert fewest_operations(batches, 1, "gram") == 6 * (gram // 2 + square // 2 + apply)


def test_bytes_of_an_update_follow_from_the_format():
    assert floors.momentum_bytes(10) == 120
    assert floors.pack_bytes(10) == 60
    assert floors.update_bytes(None, 8) == 8 * (2 + 8 + 2)
    assert floors.update_bytes(FP8_BLOCK, 128**2) == 128**2 * (2 + 8 + 1) + 4
    nvfp4 = FORMATS["nvfp4"]
    assert floors.update_bytes(nvfp4, 256) == 256 * (2 + 12) + 129


def test_small_matrices_fill_the_workspace_as_often_as_real_ones():
    settings = settings_of("auto", apart=True)
    nbytes = workspace_bytes(QWEN3, SMALL, "auto")
    for real, small in zip(QWEN3.weights(apart=True), SMALL.weights(apart=True), strict=True):
        room = settings.workspace_bytes // settings.dtype.itemsize
        fits = max(n for n in range(1, 1000) if chunk_numel(real, n, settings) <= room)
        assert chunk_numel(small, fits, settings) * settings.dtype.itemsize <= nbytes
        more = chunk_numel(small, 2 * fits, settings) * settings.dtype.itemsize
        assert more > nbytes


def test_times_of_one_part_are_added_up_in_the_order_of_a_launch(monkeypatch):
    clock = iter(range(100))

    class Tick:
        def __init__(self, device):
            self.time = next(clock)

        def ms_since(self, earlier):
            return self.time - earlier.time

    monkeypatch.setattr(stopwatch, "Mark", Tick)
    monkeypatch.setattr(stopwatch, "WARM_UP", 1)
    said = []
    parts = [(name, lambda name=name: said.append(name)) for name in ("a", "b", "a")]
    assert stopwatch.median_part_ms(parts, "cpu", 2) == {"a": 2, "b": 1}
    assert said == ["a", "b", "a"] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repeat", "0"], "error: --repeat: expected 1 or more, got 0"),
        (["--json", "/nowhere/report.json"], "error: /nowhere/report.json: expected a file"),
    ],
)
def test_bad_input_is_refused_before_the_work(options, message, capsys):
    assert benchmark.main(["muon", *options]) == cli.BAD_INPUT
    assert message in capsys.readouterr().err
