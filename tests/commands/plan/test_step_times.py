"""Estimates of steps against the measurements that are kept, with the error that a plan states."""

import json
from pathlib import Path

from moe_optim.commands.plan.gpus import GPUS, Hardware
from moe_optim.commands.plan.report import estimated_rows, read_plan
from moe_optim.commands.plan.step_times import FUSED_ERROR

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


def read_estimates(name, gpu):
    """Return a kept result, and its rows: the plug-in's and stock's."""
    report = json.loads((ROOT / f"recipes/results/{name}.json").read_text())
    workload, layout = report["workload"], ["moe_optim.expert_layout=indexed"]
    planned = read_plan(ROOT / workload["recipe"], layout, workload["megatron_args"])
    hardware = Hardware(memory_tb_per_s=GPUS[gpu].memory_tb_per_s)
    rows = estimated_rows(planned, [workload["ranks"]], hardware)["rows"]
    named = {row["format"]: row for row in rows}
    return report, {"plugin": named["fp8_block"], "stock": named["stock fp8_block"]}


def test_every_kept_result_lies_in_the_estimated_range():
    """The stated error is the largest, and no larger. The model takes most of the peak that was
    measured; the rest are activations and what a step allocates for a moment."""
    worst = 0.0
    for name, gpu in MEASURED.items():
        report, rows = read_estimates(name, gpu)
        for side, row in rows.items():
            measured = report[side]["optimizer_ms"] - report[side]["gather_ms"]
            least, most = row["step_ms"]
            assert least <= measured <= most, (name, side, measured, least, most)
            if side == "plugin":
                worst = max(worst, abs(2 * measured / (least + most) - 1))
            if name in ("step-fused-h100", "step-fused-h200", "step-h200-qwen3"):
                assert 0.8 < row["model_bytes_per_rank"] / report[side]["peak_bytes"] < 1
    assert FUSED_ERROR - 0.02 <= worst <= FUSED_ERROR
