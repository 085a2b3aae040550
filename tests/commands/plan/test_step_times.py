"""Estimates of steps against the measurements that are kept, with the error that a plan states."""

import json
from pathlib import Path

from moe_optim.commands.plan.dense import count_dense
from moe_optim.commands.plan.gpus import GPUS, Hardware
from moe_optim.commands.plan.report import estimated_rows, read_plan
from moe_optim.commands.plan.step_times import (
    FUSED_ERROR,
    UTILIZATION,
)

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

H100_FLOPS = 989e12
"""bf16 without sparsity, of H100 and H200 (SXM), by NVIDIA's data sheets."""


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


def test_no_kept_result_fills_a_gpu_so_that_none_tells_the_time_of_an_iteration():
    """FLOPs of a weight and a token: 2 forward, 4 backward; attention: 6 per layer, token and
    width of the heads times the sequence. Embeddings are looked up."""
    reached = []
    for name in MEASURED:
        report = json.loads((ROOT / f"recipes/results/{name}.json").read_text())
        workload = report["workload"]
        planned = read_plan(ROOT / workload["recipe"], [], workload["megatron_args"])
        args = planned.experts.args
        looked_up = (args.padded_vocab_size or args.vocab_size) * args.hidden_size
        dense = sum(count_dense(args)) - looked_up * args.untie_embeddings_and_output_weights
        expert = 3 * args.hidden_size * args.moe_ffn_hidden_size
        active = dense + planned.experts.layers * args.moe_router_topk * expert
        width = args.kv_channels or args.hidden_size // args.num_attention_heads
        width *= args.num_attention_heads
        per_token = 6 * active + 6 * args.num_layers * args.seq_length * width
        flops = per_token * args.global_batch_size * args.seq_length / workload["ranks"]
        reached.append(flops / (report["plugin"]["forward_backward_ms"] * 1e-3 * H100_FLOPS))
    assert UTILIZATION - 0.005 < max(reached) < UTILIZATION
