"""Tables and sentences of the documents that quote measurements in ``recipes/results``."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.checkpoint import SIDES as SAVING_SIDES
from benchmarks.tensorwise import CAST
from moe_optim.spelling import spell_bytes
from tools.documents.code_tables import table
from tools.documents.muon_tables import muon_in_short
from tools.upstream.side_by_side import Case, Comparison, Selection
from tools.upstream.versions import failures, totals

RESULTS = Path(__file__).parents[2] / "recipes" / "results"
PUBLISHED = "published-recipes.json"

STEPS = {
    "2x-h200": "2 H200",
    "2x-h200-overlapped": "2 H200, overlapped",
    "2x-h200-ep2": "2 H200, expert parallel",
    "2x-h200-ep2-overlapped": "2 H200, expert parallel, overlapped",
}
"""Suffix of ``step-*.json`` -> label in tables and plots."""

MEASURED = ("mxfp8", "mxfp8_2d", "nvfp4", "fp8_block")
"""Formats of the measurements on several GPUs; :func:`newer_formats` has the others."""
STEP_ROWS = {
    "`optimizer.step()`": ("optimizer_ms",),
    "host time of it": ("optimizer_host_ms",),
    "Adam (fused: and quantization)": ("inner_step_ms",),
    "requantize": ("requantize_ms",),
    "gather and post-processing": ("gather_ms", "post_processing_ms"),
}
SIDES = ("stock", "plugin")
CALLED = ("Megatron", "moe_optim")
"""Names of the two sides in tables and plots."""

FP32, BF16 = "fp32 to wire planes", "bf16 to wire planes, source zeroed"
AFTER = "after the gather"
STEP, NORM = "step to wire planes, {} moments", "gradient norm"
KERNELS = {"H100": "requantize-h100.json", "H200": "requantize-h200.json"}
FUSED = "step-fused-h200.json"
EXPERT_PARALLEL_STEP = "step-2x-h200-qwen3.json"
FUSED_STEPS = {
    "step-fused-h100.json": "1 H100",
    FUSED: "1 H200",
    EXPERT_PARALLEL_STEP: "2 H200, Qwen3-30B-A3B's experts",
}
MANY_WEIGHTS = "step-h200-qwen3.json"
"""Result with as many weights per rank as on the two GPUs above."""
GRAPHED = ("step-graphed-h200.json", "step-ungraphed-h200.json")
"""The step as a CUDA graph, and the same training without one."""
TENSORWISE_STEP = "step-tensorwise-h200.json"
TENSORWISE_KERNELS = "requantize-tensorwise-h100.json"
SOAK = "soak-h200.json"
FLAGS = "flags-2x-h200.json"
FLAGS_CPU = "flags-cpu.json"
EXPERTS = "experts-h200.json"
HEALTH = "health-h200.json"
HEALTH_STEPS = (FUSED, "step-health-1-h200.json")
"""The same training without health samples, and with one per iteration."""
OFFLOAD = "offload-h200.json"
EXPORT = "export-2x-h200.json"
EXPORT_ALONE = "export-h200.json"
CHANGED = "changed-cpu.json"
OFFLOAD_STEPS = {
    "0": FUSED,
    "0.5": "step-offload-0.5-h200.json",
    "1": "step-offload-1-h200.json",
}
"""``offload_states`` -> the same training with it, on the same machine."""
SAME_IN_STOCK = (FUSED, HEALTH_STEPS[1], OFFLOAD_STEPS["0.5"], OFFLOAD_STEPS["1"])
"""Runs of one machine whose stock sides are identical."""
STEP_TIMES = ("optimizer_ms", "iteration_ms")
CONVERGENCE = "convergence-h200.json"
MUON_CONVERGENCE = "convergence-muon-h100.json"
MUON = "muon-h100.json"
MUON_TRAINING = "step-muon-2x-h200-qwen3.json"
CURVES = "formats-hopper.json"
COPIES = "copies-h100.json"
WHOLE = 1000
"""Iterations of the runs whose losses count; shorter runs count for times only."""
SMOOTHED = 10
"""Iterations averaged for a comparison of losses; single ones differ by their samples."""
FUSED_ROWS = {
    "iteration": "iteration_ms",
    "forward and backward": "forward_backward_ms",
    "`optimizer.step()`": "optimizer_ms",
    "Adam (fused: and quantization)": "inner_step_ms",
    "requantize": "requantize_ms",
    "gather and post-processing": ("gather_ms", "post_processing_ms"),
    "gradient norm and the rest": ("grad_copy_ms", "grad_norm_ms", "optimizer_rest_ms"),
    "host time of `optimizer.step()`": "optimizer_host_ms",
}


@cache
def read_result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def result_files(block: str) -> tuple[str, ...]:
    """Return the files that a block is generated from, for links."""
    return RESULTS_OF.get(block, ())


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


# Losses


# Requantization


def requantize_rows(name: str, shape_set: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return (format, work, shard) -> row, for one set of shapes."""
    return {
        (row["format"], row["work"].removesuffix(", no all-reduce"), row["shard"]): row
        for row in read_result(name)["rows"]
        if row["shape_set"].partition(",")[0] == shape_set
    }


def fractions(
    work: str,
    shard: str = "1/1",
    by: str = "ms",
    *,
    missing: str = "",
    file: str,
) -> Iterator[str]:
    """Yield the fraction of the floor for each format, as cells of a table row."""
    rows = requantize_rows(file, "w1")
    for format in MEASURED:
        row = rows.get((format, work, shard), {})
        yield f"{row['floor_ms'] / row[by]:.2f}" if row.get(by) else missing


def host_times(shape_set: str) -> str:
    """Return the minimum and maximum host time of one launch over these shapes, in us."""
    rows = requantize_rows("requantize-host-h100.json", shape_set)
    times = [
        row["host_us"]
        for (_, work, _), row in rows.items()
        if row["launches"] == 1 and work != AFTER
    ]
    return f"{int(min(times) + 0.5)} to {int(max(times) + 0.5)}"


def requantize() -> str:
    """Fractions of both GPUs in one cell, to compare them."""

    def cells(work: str, shard: str = "1/1", by: str = "ms", missing: str = "") -> list[str]:
        of_each = [
            fractions(work, shard, by, missing=missing, file=file) for file in KERNELS.values()
        ]
        return [
            missing if missing in cell else ", ".join(cell) for cell in zip(*of_each, strict=True)
        ]

    of_te = {"by": "te_ms", "missing": "none"}
    rows = [
        ["fp32 masters", *cells(FP32)],
        ["Transformer Engine", *cells(FP32, **of_te)],
        ["fp32 masters, 1/8 shards", *cells(FP32, "1/8")],
        ["Transformer Engine, 1/8 shards", *cells(FP32, "1/8", **of_te)],
        ["gathered bf16", *cells(BF16)],
        ["gathered bf16, 1/8 shards", *cells(BF16, "1/8")],
        ["columnwise data, after the gather", "", "", *cells(AFTER)[2:]],
        ["Transformer Engine", "", "", *cells(AFTER, **of_te)[2:]],
    ]
    speeds = [f"{read_result(file)['copy_tb_per_s']:.2f}" for file in KERNELS.values()]
    return f"A device copy moved {' and '.join(speeds)} TB/s in the same runs.\n\n" + table(
        ["", *(f"`{name}`" for name in MEASURED)], rows
    )


def newer_formats() -> str:
    """Fractions of the floor, lowest to highest, of formats that one GPU measured."""
    works = (FP32, BF16, STEP.format("fp32"), STEP.format("bf16"))
    shares: dict[str, list[float]] = {"1/1": [], "1/8": []}
    for (format, work, shard), row in requantize_rows(KERNELS["H100"], "w1").items():
        if format not in MEASURED and work in works:
            shares[shard].append(row["fraction_of_floor"])
    whole, eighth = (f"{min(one):.2f} to {max(one):.2f}" for one in shares.values())
    return (
        f"Row-only formats and `fp8_block_fp32` reach {whole} on the H100, {eighth} with 1/8 "
        "shards, also in [steps](#a-step)."
    )


def copies() -> str:
    """Range over formats of times of quantized copies of bf16 experts, and of steps with them."""
    rows = read_result(COPIES)["rows"]
    copied, ratios = ([row[key] for row in rows] for key in ("copy_ms", "step_ratio"))
    return (
        f"On [one H100](../recipes/results/{COPIES}), a copy of {rows[0]['experts']} such experts "
        f"takes {min(copied):.2f} to {max(copied):.2f} ms, and a step of eight microbatches of\n"
        f"16,384 tokens through one `GroupedLinear` {min(ratios):.2f} to {max(ratios):.2f} of its "
        "time in bf16 (`python -m benchmarks copies`)."
    )


def step_kernels() -> str:
    file = "requantize-h200.json"
    rows = []
    for moments, shard in (("fp32", "1/1"), ("fp32", "1/8"), ("bf16", "1/1")):
        work, of_shard = STEP.format(moments), "" if shard == "1/1" else f", {shard} shards"
        of_te = fractions(work, shard, "te_ms", missing="none", file=file)
        rows.append([f"{moments} moments{of_shard}", *fractions(work, shard, file=file)])
        rows.append([f"Transformer Engine{of_shard}", *of_te])
    norms = requantize_rows(file, "w1")["mxfp8", NORM, "1/1"]
    ours, theirs = (norms["floor_ms"] / norms[by] for by in ("ms", "te_ms"))
    speed = read_result(file)["copy_tb_per_s"]
    return (
        f"A device copy moved {speed:.2f} TB/s in the same run.\n\n"
        + table(["", *(f"`{name}`" for name in MEASURED)], rows)
        + f"\n\nThe gradient norm runs at {ours:.2f} of its floor, Transformer Engine's at "
        f"{theirs:.2f}."
    )


def fused_step() -> str:
    reports = [read_result(file) for file in FUSED_STEPS]

    def cell(report: Any, keys: str | tuple[str, ...]) -> str:
        named = (keys,) if isinstance(keys, str) else keys
        return pair(report, lambda side: f"{sum(side[key] or 0.0 for key in named):.1f}")

    def pair(report: Any, spell: Callable[[Any], str]) -> str:
        return ", ".join(spell(report[side]) for side in SIDES)

    rows = [
        [label, *(cell(report, keys) for report in reports)] for label, keys in FUSED_ROWS.items()
    ]
    steps = [[report[side]["optimizer_ms"] for side in SIDES] for report in reports]
    rows.append(["`optimizer.step()`, ratio", *(f"{ours / stock:.2f}" for stock, ours in steps)])
    rows += [
        [
            "peak memory, GiB",
            *(pair(r, lambda s: f"{s['peak_bytes'] / 2**30:.1f}") for r in reports),
        ],
        ["gathered, GB", *(pair(r, lambda s: f"{s['gathered_bytes'] / 1e9:.2f}") for r in reports)],
    ]
    return f"{table(['', *FUSED_STEPS.values()], rows)}\n\n{gathered_twice()}"


def steps_in_short() -> str:
    rows = []
    for file, label in FUSED_STEPS.items():
        sides = [read_result(file)[side] for side in SIDES]
        times = [[milliseconds(side[key]) for side in sides] for key in STEP_TIMES]
        cells = [" → ".join(one) for one in times]
        rows.append([f"[{label}](recipes/results/{file})", *cells])
    return table(["Megatron → moe_optim", "`optimizer.step()`, ms", "iteration, ms"], rows)


def gathered_twice() -> str:
    """Return the bytes that stock gathers with expert parallelism, where it has two optimizers."""
    stock, ours = (read_result(EXPERT_PARALLEL_STEP)[side] for side in SIDES)
    if round(stock["gathered_bytes"] / ours["gathered_bytes"], 2) != 2:
        raise ValueError("documents say that stock gathers twice, and it does not")
    return (
        "With expert parallelism and nothing overlapped, Megatron 0.19 gathers everything twice, "
        "once for each of its two\noptimizers."
    )


def fused_step_host() -> str:
    in_stock, iterations = (
        [read_result(file)["stock"][key] for file in SAME_IN_STOCK] for key in STEP_TIMES
    )
    links = (
        f"[{number}](../recipes/results/{file})" for number, file in enumerate(SAME_IN_STOCK, 1)
    )
    many = read_result(MANY_WEIGHTS)
    ours, stock = many["plugin"], many["stock"]
    step, iteration = (f"{min(ms):.0f} to {max(ms):.0f} ms" for ms in (in_stock, iterations))
    return (
        f"Megatron's time depends on the host: in four runs on one machine ({', '.join(links)}) its"
        f"\nstep took {step}, an iteration {iteration}. With 6 layers of 128 experts on "
        f"[one\nH200](../recipes/results/{MANY_WEIGHTS}) the step took "
        f"{stock['optimizer_ms']:.0f} ms in Megatron, {ours['optimizer_ms']:.0f} ms in moe_optim."
    )


def graphed_step() -> str:
    """Return the times of a step as a CUDA graph, and without one."""
    graphed, without = (
        " → ".join(f"{read_result(name)[side]['optimizer_ms']:.0f}" for side in SIDES)
        for name in GRAPHED
    )
    with_, without_ = (f"(../recipes/results/{name})" for name in GRAPHED)
    return (
        f"[As a CUDA graph]{with_} (`--optimizer-cuda-graph`) the step takes {graphed} ms, "
        f"Megatron → moe_optim;\n[without]{without_} {without} ms."
    )


def tensorwise_step() -> str:
    report = read_result(TENSORWISE_STEP)
    step, host, after = (
        " → ".join(f"{report[side][key]:.{digits}f}" for side in SIDES)
        for key, digits in (
            ("optimizer_ms", 0),
            ("optimizer_host_ms", 0),
            ("post_processing_ms", 1),
        )
    )
    casts = f"{report['stock']['requantize_ms']:.0f}"
    return (
        f"On [one H200](../recipes/results/{TENSORWISE_STEP}), Megatron → moe_optim: "
        f"`optimizer.step()` {step} ms, of which Megatron's casts\ntake {casts}; the host busy for "
        f"{host} ms; transposes {after} ms. The other GPU of the host was busy."
    )


def tensorwise_kernels() -> str:
    report = read_result(TENSORWISE_KERNELS)
    rows = {(row["shard"], row["work"]): row for row in report["rows"]}

    def said(shard: str, work: str) -> str:
        row = rows[shard, work]
        ms, share, te_ms = row["ms"], row["fraction_of_floor"], row["te_ms"]
        return f"{ms:.2f} ms ({share:.2f} of the floor; Transformer Engine {te_ms:.1f} ms)"

    return (
        f"On [one H100](../recipes/results/{TENSORWISE_KERNELS}), the cast of a fused step with "
        f"`--fp8-recipe tensorwise` takes {rows['1/1', CAST]['launches']} launches:\n\n"
        f"- whole weights: {said('1/1', CAST)};\n- 1/8 shards: {said('1/8', CAST)}.\n\nThe "
        f"transposes that Hopper's GEMMs read take {said('1/1', AFTER)}."
    )


# Runs beside stock


def soak() -> str:
    report = read_result(SOAK)
    if report["grown"]:
        raise ValueError(f"documents say that nothing grew, and {report['grown']} did")
    figures = ", ".join(row["figure"].partition(",")[0] for row in report["rows"])
    return (
        f"In [{report['iterations']:,} iterations](../recipes/results/{SOAK}) with "
        f"{report['saves']} saves and {report['evaluations']} evaluations on one H200\nnothing "
        f"grew: {figures} (`python -m tools.upstream.soak`)."
    )


def flags_in_short() -> str:
    """Return the number of settings whose runs equal those beside them in every printed digit."""
    compared = ("losses", "grad_norms", "validation_losses")
    lines = []
    for result, where in ((FLAGS, "two H200"), (FLAGS_CPU, "two CPU ranks")):
        report = read_result(result)
        for pair in report["pairs"]:
            one, other = (report["runs"][name] for name in pair["of"])
            if any(one[what] != other[what] for what in compared):
                raise ValueError(
                    f"documents say that all pairs are equal, and {pair['with']} is not"
                )
        lines.append(f"[{len(report['pairs'])} settings](../recipes/results/{result}) on {where}")
    return " and ".join(lines) + "."


def smoothed(losses: list[float]) -> list[float]:
    """Return moving averages over :data:`SMOOTHED` losses."""
    count = len(losses) - SMOOTHED + 1
    return [mean(losses[first : first + SMOOTHED]) for first in range(count)]


def apart(one: list[float], other: list[float]) -> list[float]:
    """Return the difference of two smoothed runs in each iteration."""
    return [abs(a - b) for a, b in zip(smoothed(one), smoothed(other), strict=True)]


def distances(name: str = CONVERGENCE) -> dict[str, list[float]]:
    """Return the difference of plug-in and stock for each seed, and of stock between two seeds."""
    rows = read_result(name)["rows"]
    found = {f"moe_optim, seed {row['seed']}": apart(row["stock"], row["plugin"]) for row in rows}
    first, second = (row["stock"] for row in rows)
    return found | {"Megatron, other seed": apart(first, second)}


def convergence(name: str = CONVERGENCE) -> str:
    *ours, of_seeds = distances(name).values()
    if any(mean(one) >= mean(of_seeds) for one in ours):
        raise ValueError("documents say that seeds differ by more than optimizers, and they do not")
    said = " and ".join(f"{mean(one):.4f}" for one in ours)
    return (
        f"Over the [run](../recipes/results/{name}), means of ten losses of Megatron and moe_optim "
        f"differ on average by\n{said} (two seeds); those of two seeds of Megatron differ by "
        f"{mean(of_seeds):.4f}."
    )


SPELT_SIDES = {
    "stock bf16": "Megatron, bf16",
    "stock FP8 blocks": "Megatron, blockwise FP8",
    "FP8 blocks": "moe_optim, blockwise FP8",
    "FP8 blocks, moved": "the same, resharded on resume",
}
"""Side in the record of losses -> name in tables and plots; portable experts keep theirs."""


def spelt(side: str) -> str:
    return SPELT_SIDES.get(side, side)


def runs_by_side() -> dict[str, list[dict[str, Any]]]:
    """Return side -> its complete runs of the recorded formats, one per seed."""
    sides: dict[str, list[dict[str, Any]]] = {}
    for row in read_result(CURVES)["rows"]:
        if row["iterations"] == WHOLE:
            sides.setdefault(row["side"], []).append(row)
    return sides


def runs_of_common_seeds() -> dict[str, list[dict[str, Any]]]:
    """Return side -> its complete runs of the seeds that all sides have, so that means compare."""
    sides = runs_by_side()
    common = set.intersection(*({row["seed"] for row in runs} for runs in sides.values()))
    return {side: [row for row in runs if row["seed"] in common] for side, runs in sides.items()}


def last_held_out(row: Mapping[str, Any]) -> float:
    """Return the mean of the last five held-out losses, since one covers few samples."""
    return mean(loss for _, loss in row["held_out"][-5:])


def above_bf16() -> str:
    """Return the minimum and maximum mean loss above bf16's, with everything quantized."""
    ends = {
        side: mean(last_held_out(row) for row in runs)
        for side, runs in runs_of_common_seeds().items()
    }
    of_bf16 = [end for side, end in ends.items() if side.endswith("bf16")]
    more = [end - one for side, end in ends.items() if not side.endswith("bf16") for one in of_bf16]
    return f"{min(more):.2f} to {max(more):.2f}"


def spread_of_stock() -> float:
    """Return the range of the final losses of stock's FP8 blocks over seeds."""
    ends = [last_held_out(row) for row in runs_by_side()["stock FP8 blocks"]]
    return max(ends) - min(ends)


def losses_in_short() -> str:
    return (
        f"After {WHOLE:,} iterations of the small model, [all quantized "
        "runs](docs/performance.md#what-a-format-costs-in-loss),\nMegatron's blockwise FP8 "
        f"included, ended {above_bf16()} nats per byte above bf16; seeds of Megatron\ndiffer by "
        f"up to {spread_of_stock():.2f}."
    )


def formats_compared() -> str:
    """Losses over common seeds, and differences from stock."""
    rows = []
    for side, runs in runs_of_common_seeds().items():
        losses = [last_held_out(row) for row in runs]
        rows.append([spelt(side), f"{mean(losses):.3f}", ", ".join(f"{one:.3f}" for one in losses)])
    seeds = [row["seed"] for row in runs]
    stock, ours = (
        {row["seed"]: last_held_out(row) for row in runs_by_side()[side]}
        for side in ("stock FP8 blocks", "FP8 blocks")
    )
    if stock.keys() != ours.keys():
        raise ValueError("documents compare stock and ours over the same seeds, and they differ")
    more = [ours[seed] - stock[seed] for seed in stock]
    means = f"moe_optim {mean(ours.values()):.3f}, Megatron {mean(stock.values()):.3f}"
    header = ["", "mean loss", f"seeds {', '.join(map(str, seeds))}"]
    return table(header, rows) + (
        f"\n\nAll quantized runs, Megatron's included, ended {above_bf16()} above bf16. Blockwise "
        f"FP8 has {len(more)} seeds: {means},\na difference of {min(more):+.3f} to "
        f"{max(more):+.3f} per seed, {mean(more):+.3f} on average. Seeds of Megatron differ by up "
        f"to {spread_of_stock():.3f}."
    )


PLACEMENTS = ("contiguous", "scattered")


def fake_quantization() -> str:
    """Forward and backward times; ours relative to the fastest other."""
    report = read_result(EXPERTS)
    rows = report["rows"]
    columns = [(way, place) for way in ("moe_optim", "ModelOpt") for place in PLACEMENTS]
    table_rows = []
    cases = dict.fromkeys((row["bits"], row["experts"]) for row in rows if row["experts"] >= 32)
    for bits, experts in cases:
        of_case = {
            (row["way"], row["placement"]): row
            for row in rows
            if (row["bits"], row["experts"]) == (bits, experts)
        }
        cells = [
            ", ".join(f"{of_case[column][key]:.2f}" for key in ("forward_ms", "backward_ms"))
            for column in columns
        ]
        table_rows.append([f"`{bits}`", str(experts), *cells])
    apart = [
        row
        for row in rows
        if (row["way"], row["placement"], row["experts"]) == ("moe_optim", "scattered", 32)
    ]
    of_other = [
        f"{max(row[f'{direction}_of_best_other'] for row in apart):.2f}"
        for direction in ("forward", "backward")
    ]
    header = ["bits", "experts", *(", ".join(column) for column in columns)]
    return table(header, table_rows) + (
        f"\n\nFor 32 scattered experts, moe_optim takes at most {of_other[0]} (forward) and "
        f"{of_other[1]} (backward) of the time of the fastest\nother way, plain torch included."
    )


def health_cost() -> str:
    report = read_result(HEALTH)
    rows = [row for row in report["rows"] if row["work"] == "health"]
    said = ", ".join(f"`{row['format']}` {row['ms']:.2f}" for row in rows)
    without, sampling = (read_result(name)["plugin"] for name in HEALTH_STEPS)
    more = sampling["optimizer_ms"] - without["optimizer_ms"]
    share = more / sampling["iteration_ms"]
    figures, *sides = (
        f"[{said}](../recipes/results/{name})"
        for said, name in zip(("figures", "without", "with"), (HEALTH, *HEALTH_STEPS), strict=True)
    )
    return (
        f"A sample of {rows[0]['parameters'] / 1e9:.3f}e9 parameters on one H200 takes, in ms: "
        f"{said}\n({figures}). In training (`hopper_fp8_block.yaml`), a sample per iteration "
        f"lengthens `optimizer.step()`\nfrom {without['optimizer_ms']:.1f} to "
        f"{sampling['optimizer_ms']:.1f} ms ({', '.join(sides)}): {100 * share:.1f}% of an "
        f"iteration, or {share / 100:.2%} with `health_interval: 100`."
    )


def export_cost() -> str:
    report = read_result(EXPORT)
    ways = ("bf16", "bf16, quantized again", "as they are")
    rows = {(row["format"], row["tensors"], row["way"]): row for row in report["rows"]}
    lines = []
    for format in dict.fromkeys(format for format, *_ in rows):
        of_ways = [rows[format, "stacked", way] for way in ways]
        ours = of_ways[-1]
        lines.append(
            [
                f"`{format}`",
                *(milliseconds(row["ms"]) for row in of_ways),
                f"{ours['of_bf16']:.2f}",
                spell_bytes(ours["loaded_bytes"]),
            ]
        )
    first = report["rows"][0]
    each = _of_bf16(report["rows"], "one each")
    alone = _of_bf16(read_result(EXPORT_ALONE)["rows"], "stacked")
    header = ["format", "bf16, ms", "requantized, ms", "quantized, ms", "ratio", "size"]
    return (
        f"{first['model']} ({first['parameters'] / 1e9:.2f}e9 parameters, "
        f"{spell_bytes(first['loaded_bytes'])} in bf16) over {first['ranks']} H200 "
        f"([figures](../recipes/results/{EXPORT})):\n\n{table(header, lines)}\n\n"
        f"With one tensor per expert the ratio is {each[0]:.1f} to {each[-1]:.1f}: the engine "
        f"copies data and scales of each expert separately.\nStacked, on [one "
        f"H200](../recipes/results/{EXPORT_ALONE}) without communication, it is {alone[0]:.3f} to "
        f"{alone[-1]:.3f}."
    )


def _of_bf16(rows: Iterable[Any], tensors: str) -> list[float]:
    """Return the ratios of experts that go as they are, smallest first."""
    ways = ("as they are", tensors)
    return sorted(row["of_bf16"] for row in rows if (row["way"], row["tensors"]) == ways)


def changed_words() -> str:
    report = read_result(CHANGED)
    rows = {
        (row["format"], row["lr"], row["gradients"], row["steps"]): row for row in report["rows"]
    }
    cases = {"step": ("noise", 1), "largest step": ("the same", 1), "16 steps": ("noise", 16)}
    formats = dict.fromkeys(row["format"] for row in report["rows"])
    lines = (
        [f"`{name}`", *(f"{rows[name, 1e-6, *case]['sent_4']:.2%}" for case in cases.values())]
        for name in formats
    )
    return table(["format", *cases], lines)


def offload_cost() -> str:
    """Range over formats of a step with all states on the host."""
    report = read_result(OFFLOAD)
    rows = [row for row in report["rows"] if row["offload_states"] == 1]
    ms, shares = ([row[key] for row in rows] for key in ("ms", "fraction_of_link"))
    return (
        f"On [one H200](../recipes/results/{OFFLOAD}), whose link moves "
        f"{report['link_gb_per_s']:.0f} GB/s each way, a fused step of "
        f"{rows[0]['parameters'] / 1e9:.3f}e9 parameters\nwith `offload_states: 1` takes "
        f"{min(ms):.0f} to {max(ms):.0f} ms, {min(shares):.2f} to {max(shares):.2f} of that speed."
    )


def offload_training() -> str:
    header = ["`offload_states`", "peak on the GPU, GiB", "`optimizer.step()`, ms", "iteration, ms"]
    lines = []
    for share, name in OFFLOAD_STEPS.items():
        sides = [read_result(name)[side] for side in SIDES]
        times = [[f"{side[key]:.0f}" for side in sides] for key in STEP_TIMES]
        cells = [[f"{side['peak_bytes'] / 2**30:.1f}" for side in sides], *times]
        lines.append([f"[{share}](../recipes/results/{name})", *map(", ".join, cells)])
    return (
        "Training `hopper_fp8_block.yaml` on one H200, Megatron without offload, then moe_optim, "
        "in the same run:\n\n"
    ) + table(header, lines)


def host() -> str:
    rows = requantize_rows("requantize-h100.json", "w1")
    copied = [rows[format, AFTER, "1/1"]["ms"] for format in ("mxfp8", "mxfp8_2d")]
    return (
        f"A launch takes the host {host_times('few')} us for 12 expert weights and "
        f"{host_times('many')} us for 12,288.\nAfter the gather, `mxfp8` and `mxfp8_2d` only copy "
        f"scales: {copied[0]:.2f} and {copied[1]:.2f} ms for the experts above."
    )


# The gather


def gather_rows() -> dict[tuple[int, str, str], dict[str, Any]]:
    """Return (ranks, format, wire) -> row."""
    return {
        (ranks, row["format"], row["wire"]): row
        for ranks in (2, 4)
        for row in read_result(f"gather-{ranks}x-h200.json")["rows"]
    }


def gather() -> str:
    rows = gather_rows()

    def column(key: str, ranks: int, wire: str = "quantized") -> list[str]:
        return [f"{rows[ranks, format, wire][key]:.2f}" for format in MEASURED]

    bf16 = [f"{rows[ranks, 'bf16', 'bf16']['total_ms']:.2f} ms on {ranks}" for ranks in (2, 4)]
    return f"bf16 weights take {' GPUs and '.join(bf16)} GPUs.\n\n" + table(
        ["", *(f"`{name}`" for name in MEASURED)],
        [
            *([f"{ranks} GPUs", *column("ratio_to_bf16", ranks)] for ranks in (2, 4)),
            ["4 GPUs, `wire: bf16`", *column("ratio_to_bf16", 4, "bf16")],
        ],
    )


# Whole steps


def step_reports() -> dict[str, Any]:
    """Return name -> report of ``python -m benchmarks step``."""
    return {name: read_result(f"step-{name}.json") for name in STEPS}


def steps() -> str:
    reports = step_reports().values()

    def cell(report: Any, keys: tuple[str, ...]) -> str:
        return ", ".join(milliseconds(sum(report[side][key] for key in keys)) for side in SIDES)

    rows = [[label, *(cell(one, keys) for one in reports)] for label, keys in STEP_ROWS.items()]
    return table(["", *STEPS.values()], rows)


# Checkpoints as files

CHECKPOINT_ON_GPU = "checkpoint-h200.json"


def checkpoint() -> str:
    report = read_result("checkpoint-cpu.json")
    columns = {
        "save, s": "save_s", "load, s": "load_s", "memory to save, MiB": "save_peak_bytes",
        "to load": "load_peak_bytes", "written, MiB": "written_bytes", "read": "read_bytes",
    }  # fmt: skip
    of_gpu = {"GPU to save, MiB": "save_gpu_peak_bytes", "GPU to load": "load_gpu_peak_bytes"}

    def table_of(rows: Sequence[dict[str, Any]], columns: Mapping[str, str]) -> str:
        found = {(row["ranks"], row["side"]): row for row in rows}

        def cell(ranks: int, name: str) -> str:
            values = [
                found[place][name] for side in SAVING_SIDES if (place := (ranks, side)) in found
            ]
            is_size = name.endswith("bytes")
            return ", ".join(f"{one / 2**20:.0f}" if is_size else f"{one:.1f}" for one in values)

        lines = [
            [str(ranks), *(cell(ranks, name) for name in columns.values())]
            for ranks in dict.fromkeys(ranks for ranks, _ in found)
        ]
        return table(["ranks", *columns], lines)

    on_gpu = read_result(CHECKPOINT_ON_GPU)
    return (
        f"{report['parameters'] / 1e6:.0f}e6 parameters, on the CPU:\n\n"
        f"{table_of(report['rows'], columns)}\n\n"
        f"{on_gpu['parameters'] / 1e9:.1f}e9 parameters, on one GPU:\n\n"
        f"{table_of(on_gpu['rows'], columns | of_gpu)}"
    )


def convert() -> str:
    report = read_result("convert-cpu.json")
    cores = report["device"].split()[-2]
    return (
        f"Converting {report['bytes'] / 1e9:.1f} GB took "
        f"{report['convert_s']:.0f} s, copying the files {report['copy_s']:.0f} s, on {cores} "
        f"cores; peak memory was {report['peak_bytes'] / 1e9:.2f} GB\n"
        "([figures](../recipes/results/convert-cpu.json))."
    )


# Megatron's own unit tests

UPSTREAM = {
    "upstream-2x-h200.json": "Megatron 0.19.0: parameters, buffers, layouts, checkpoints",
    "upstream-buffers-cpu.json": "Megatron 0.19.0: buffers",
    "upstream-grouped-cpu.json": "Megatron 0.19.0: experts in one tensor",
    "upstream-grouped-h200.json": "the same, one rank",
    "upstream-main-cpu.json": "Megatron main, 22 August 2026: experts in one tensor, buffers",
    "upstream-dev-cpu.json": "Megatron dev: experts in one tensor, buffers",
    "upstream-engine-2x-h200.json": "Transformer Engine 2.20: casts, FusedAdam by moe_optim",
}
"""Record of :mod:`tools.upstream.side_by_side` -> what ran, in a table."""


def upstream_in_short() -> str:
    """Return one row per run of upstream's own tests, without and with the plug-in."""
    rows = []
    for name, what in UPSTREAM.items():
        report = read_result(name)
        pairs = []
        for file in report["files"]:
            stock, plug_in = (
                {test: Case(**case) for test, case in file[side].items()}
                for side in ("stock", "plug_in")
            )
            pairs.append(Comparison(Selection(**file["selection"]), stock, plug_in))
        if any(pair.unexplained() for pair in pairs):
            raise ValueError(f"documents say why each case that differs does, and {name} does not")
        counted = [test for pair in pairs for test in pair.counted()]
        differing = sum(len(pair.differences()) for pair in pairs)
        through = sum(pair.ran() for pair in pairs)
        devices = report["device"]
        device = devices if isinstance(devices, str) else devices[0]
        refused = any(pair.refusal() for pair in pairs)
        rows.append(
            [
                f"[{what}](../recipes/results/{name})",
                device.split()[-1],
                str(len(counted)),
                str(through),
                "refused" if refused else str(differing),
            ]
        )
    return table(["tests", "on", "cases", "through moe_optim", "differ"], rows)


# Other versions

VERSIONS = "versions-cpu.json"
MOVED = {"tests/megatron/te": "tests/weights/te"}
"""Folder of tests in a recorded command -> where these tests are today."""


def versions() -> str:
    """Outcomes of the suite by versions, and each failed case."""
    rows, failed = [], []
    for run in read_result(VERSIONS)["runs"]:
        numbers, counts = run["versions"], totals(run["files"])
        core = numbers["megatron-core"]
        if run["source"] != "wheel":
            core += f", {run['source']}"
        if engine := numbers.get("transformer-engine"):
            core += f", Transformer Engine {engine}"
        ran = [f"`{words}`" for words in map(tests_of, run["commands"]) if words]
        what = ", ".join(ran) if len(ran) == len(run["commands"]) else "suite"
        outcomes = [f"{counts[outcome]:,}" for outcome in ("passed", "skipped")]
        rows.append([core, numbers["torch"], what, *outcomes])
        label = f"megatron-core {numbers['megatron-core']}, torch {numbers['torch']}"
        failed += failed_cases(label, run)
    header = ["megatron-core", "torch", "what ran", "passed", "skipped"]
    return f"{table(header, rows)}\n\n" + (
        "\n".join(["Failed:", "", *failed]) if failed else "None failed."
    )


def failed_cases(label: str, run: Mapping[str, Any]) -> list[str]:
    return [f"- {label}: `{line.partition(': ')[0]}`" for line in failures(run["files"])]


def tests_of(command: str) -> str:
    """Return the tests that a command names; empty if it ran all."""
    words = [MOVED.get(word, word) for word in shlex.split(command)]
    return " ".join(word for word in words if word.startswith("tests/"))


KEPT_IN = {
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "blockwise": "blockwise FP8",
    "tensorwise": "per-tensor FP8",
    "delayed": "delayed FP8",
    "bf16": "bf16",
    "unknown": "unread",
}
"""Format of published recipes -> label in the table, in order."""


OF_NVIDIA = ("Megatron-Bridge", "Megatron-LM", "Megatron-LM's functional tests")


def published() -> str:
    """Return the numbers of recipes by source and storage, with what is refused in parentheses."""
    found = {(one["source"], one["kept"]): one for one in read_result(PUBLISHED)["totals"]}
    seen = {name for source, name in found if source in OF_NVIDIA}
    if not seen <= KEPT_IN.keys():
        raise ValueError(f"{PUBLISHED}: expected formats of KEPT_IN, got {seen - KEPT_IN.keys()}")
    kept = [name for name in KEPT_IN if name in seen]
    rows = []
    for source in OF_NVIDIA:
        totals = (found.get((source, name)) for name in kept)
        rows.append([source, *(_spell_recipes(one) if one else "" for one in totals)])
    return table(["recipes of", *(KEPT_IN[name] for name in kept)], rows)


def _spell_recipes(total: Mapping[str, Any]) -> str:
    refused = ", ".join(f"`{flag}`: {count}" for flag, count in total["settings"].items())
    return f"{total['recipes']}" + (f" ({refused})" if refused else "")


def published_launches() -> str:
    """Return how many recipes of slime and miles pass the checks, all of which must."""
    found = [one for one in read_result(PUBLISHED)["totals"] if one["source"] in ("slime", "miles")]
    if any(one["passing"] != one["recipes"] or one["kept"] != "bf16" for one in found):
        raise ValueError("documents say that all recipes pass with bf16 weights, and some do not")
    counts = " and ".join(f"{one['recipes']} of {one['source']}" for one in found)
    return (
        f"All published recipes, {counts}, pass the plug-in's checks\n"
        f"([totals](../recipes/results/{PUBLISHED})); none was run."
    )


MEASURED_TABLES: Mapping[str, Callable[[], str]] = {
    "convergence": convergence,
    "formats-compared": formats_compared,
    "checkpoint": checkpoint,
    "convert": convert,
    "copies": copies,
    "fake-quantization": fake_quantization,
    "flags-in-short": flags_in_short,
    "upstream-in-short": upstream_in_short,
    "fused-step": fused_step,
    "fused-step-host": fused_step_host,
    "gather": gather,
    "graphed-step": graphed_step,
    "health-cost": health_cost,
    "host": host,
    "changed-words": changed_words,
    "export-cost": export_cost,
    "newer-formats": newer_formats,
    "offload-cost": offload_cost,
    "offload-training": offload_training,
    "muon-convergence": lambda: convergence(MUON_CONVERGENCE),
    "muon-in-short": lambda: muon_in_short(read_result(MUON), read_result(MUON_TRAINING)),
    "published": published,
    "published-launches": published_launches,
    "soak": soak,
    "requantize": requantize,
    "step-kernels": step_kernels,
    "steps": steps,
    "tensorwise-kernels": tensorwise_kernels,
    "tensorwise-step": tensorwise_step,
    "versions": versions,
    "steps-in-short": steps_in_short,
    "losses-in-short": losses_in_short,
}

RESULTS_OF: Mapping[str, tuple[str, ...]] = {
    "formats-compared": (CURVES,),
    "checkpoint": ("checkpoint-cpu.json", CHECKPOINT_ON_GPU),
    "convert": ("convert-cpu.json",),
    "fake-quantization": (EXPERTS,),
    "gather": ("gather-2x-h200.json", "gather-4x-h200.json"),
    "copies": (COPIES,),
    "health-cost": (HEALTH, *HEALTH_STEPS),
    "host": ("requantize-h100.json", "requantize-host-h100.json"),
    "changed-words": (CHANGED,),
    "export-cost": (EXPORT, EXPORT_ALONE),
    "newer-formats": (KERNELS["H100"],),
    "offload-cost": (OFFLOAD,),
    "offload-training": tuple(OFFLOAD_STEPS.values()),
    "muon-in-short": (MUON, MUON_TRAINING),
    "published": (PUBLISHED,),
    "published-launches": (PUBLISHED,),
    "requantize": tuple(KERNELS.values()),
    "fused-step": tuple(FUSED_STEPS),
    "fused-step-host": (*SAME_IN_STOCK, MANY_WEIGHTS),
    "step-kernels": ("requantize-h200.json",),
    "steps": tuple(f"step-{name}.json" for name in STEPS),
    "tensorwise-kernels": (TENSORWISE_KERNELS,),
    "versions": (VERSIONS,),
    "losses-in-short": (CURVES,),
}
"""Block -> result files that it is generated from."""
