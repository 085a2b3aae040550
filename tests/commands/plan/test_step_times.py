"""Estimates of steps against the measurements that are kept, with the error that a plan states."""

import json
import shlex
from pathlib import Path

import pytest

from moe_optim.commands.plan.gpus import GPUS, Hardware
from moe_optim.commands.plan.report import estimated_rows, read_plan
from moe_optim.commands.plan.step_times import FUSED_ERROR, fused_step, stock_step

ROOT = Path(__file__).parents[3]
MEASURED = {
    "step-fused-h100": "h100",
    "step-fused-h200": "h200",
    "step-h200-qwen3": "h200",
    "step-ungraphed-h200": "h200",
    "step-2x-h200": "h200",
    "step-2x-h200-ep2": "h200",
    "step-2x-h200-qwen3": "h200",
}
"""Kept results of blockwise FP8, Adam and states on the device, without overlap -> GPU."""


def estimate(report, gpu):
    """Return the estimates of the plug-in's row and of stock's for a kept result."""
    workload = report["workload"]
    planned = read_plan(
        ROOT / workload["recipe"],
        ["moe_optim.expert_layout=indexed"],
        workload["megatron_args"],
    )
    hardware = Hardware(memory_tb_per_s=GPUS[gpu].memory_tb_per_s)
    report = estimated_rows(planned, [workload["ranks"]], hardware)
    named = {row["format"]: row for row in report["rows"]}
    return named["fp8_block"], named["stock fp8_block"]


@pytest.mark.parametrize(("name", "gpu"), MEASURED.items(), ids=MEASURED)
def test_every_kept_result_lies_in_the_estimated_range(name, gpu):
    report = json.loads((ROOT / f"recipes/results/{name}.json").read_text())
    for side, row in zip(("plugin", "stock"), estimate(report, gpu), strict=True):
        measured = report[side]["optimizer_ms"] - report[side]["gather_ms"]
        least, most = row["step_ms"]
        assert least <= measured <= most, (side, measured, least, most)


@pytest.mark.parametrize("name", ["step-fused-h100", "step-fused-h200", "step-h200-qwen3"])
def test_the_model_takes_no_more_than_the_peak_that_was_measured_and_most_of_it(name):
    """The rest are activations and what a step allocates for a moment."""
    report = json.loads((ROOT / f"recipes/results/{name}.json").read_text())
    ours, stock = estimate(report, "h200")
    for side, row in (("plugin", ours), ("stock", stock)):
        assert 0.8 < row["model_bytes_per_rank"] / report[side]["peak_bytes"] < 1


def test_the_stated_error_is_the_largest_and_no_larger():
    worst = 0.0
    for name, gpu in MEASURED.items():
        report = json.loads((ROOT / f"recipes/results/{name}.json").read_text())
        least, most = estimate(report, gpu)[0]["step_ms"]
        measured = report["plugin"]["optimizer_ms"] - report["plugin"]["gather_ms"]
        worst = max(worst, abs(2 * measured / (least + most) - 1))
    assert FUSED_ERROR - 0.02 <= worst <= FUSED_ERROR


def test_a_fused_step_follows_bytes_and_stocks_the_number_of_weights():
    assert sum(fused_step(0, 4.8)) == 3
    assert fused_step(72 * 10**9, 1.0).least == pytest.approx(101.5 * (1 - FUSED_ERROR))
    many, few = stock_step(10**9, 1000, 4.8), stock_step(10**9, 1, 4.8)
    assert many == (115, 250)
    assert few.least == few.most == pytest.approx(48e9 / (0.72 * 4.8e9))


def test_no_kept_result_of_such_a_step_is_left_out():
    """No kept result of a step in blockwise FP8 is left out without a reason."""
    left_out = {
        "overlapped",
        "graphed",
        "offload",
        "muon",
        "health",
        "te-2.17",
        "tensorwise",
        "mxfp4",
    }
    for path in (ROOT / "recipes/results").glob("step-*.json"):
        report = json.loads(path.read_text())
        assert path.stem in MEASURED or any(word in path.stem for word in left_out), path
        assert shlex.split(report["command"])
