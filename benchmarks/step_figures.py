"""Figures of ``python -m benchmarks step``: meanings, and reduction over ranks and processes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from moe_optim.spelling import spell_bytes

SIDES = {"stock": "stock", "plugin": "plug-in"}
"""Keys of the report, with labels."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One key of the report."""

    label: str
    meaning: str


PARTS = {
    "forward_backward_ms": Figure(
        "forward and backward", "with the reduction of gradients, without the parts below"
    ),
    "grad_copy_ms": Figure("gradients to masters", "in fp32, of what this rank owns"),
    "grad_norm_ms": Figure("gradient norm", "over all ranks; the host waits for it"),
    "inner_step_ms": Figure(
        "inner step", "Adam's and Muon's; a fused one scales gradients and encodes weights, too"
    ),
    "requantize_ms": Figure(
        "requantize",
        "masters to quantized or bf16 weights, with the maxima that ranks exchange for it",
    ),
    "gather_ms": Figure(
        "gather",
        "the collectives alone; where they overlap with the forward pass, what it waits for them",
    ),
    "post_processing_ms": Figure(
        "post-processing", "what has arrived, put in place; columnwise copies and their scales"
    ),
    "optimizer_rest_ms": Figure(
        "rest of optimizer.step()",
        "clipping and bookkeeping; and what a CUDA graph replays, which has no parts",
    ),
}
"""Keys of the parts: disjoint, in the order of a step without overlap."""

REST = "unaccounted_ms"
FIGURES = {
    "iteration_ms": Figure("iteration", "from one to the next, nothing else being measured"),
    **PARTS,
    REST: Figure(
        "in none of these parts",
        "what is left of the iteration; below 0 where clocks of other iterations differ",
    ),
    "optimizer_ms": Figure("optimizer.step(), all of it", "the parts that run within it"),
    "main_to_model_and_gather_ms": Figure(
        "masters to weights", "requantize, gather and post-processing, wherever they run"
    ),
    "optimizer_host_ms": Figure(
        "optimizer.step() on the host",
        "until the call returns, the device idle when it begins, without the gradient norm",
    ),
    "gathered_bytes": Figure(
        "gathered", "completed by all-gathers of weights on rank 0, its own share included"
    ),
    "reduced_bytes": Figure("reduced", "maxima that ranks exchange to quantize, on rank 0"),
    "peak_bytes": Figure("peak memory", "most that was allocated so far, by the worst rank"),
}
"""Every key of ``stock``, ``plugin`` and ``ratio``, in table order."""

_ENDS_OF_SECTIONS = ("iteration_ms", REST, "optimizer_host_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of one process group."""

    losses: tuple[str, ...]
    """Loss of every iteration, with 9 digits, which identify an fp32 value."""
    values: dict[str, list[float]]
    """Key of the report -> one value per iteration that measured it."""


def meanings() -> str:
    """Return all labels with their keys and meanings, for ``--help``."""
    lines = [f"  {key}: {figure.label}\n      {figure.meaning}" for key, figure in FIGURES.items()]
    return "\n".join(
        (
            "Times are those of a GPU's compute stream in the iteration's course (of the host on a",
            "CPU), of the slowest rank; all figures are medians over iterations and processes:",
            *lines,
        )
    )


def merge(ranks: Sequence[Sequence[dict[str, Any]]]) -> Measured:
    """Merge the iterations of all ranks: the slowest times, and the largest memory."""
    values: dict[str, list[float]] = {}
    losses: list[str] = []
    for of_ranks in zip(*ranks, strict=True):
        losses += [one["loss"] for one in of_ranks if one["loss"] is not None][:1]
        if of_ranks[0]["kind"] == "warm-up":
            continue
        for key in {key for one in of_ranks for key in one["ms"]}:
            slowest = max(one["ms"].get(key, 0.0) for one in of_ranks)
            values.setdefault(f"{key}_ms", []).append(slowest)
        for key, first in of_ranks[0]["bytes"].items():
            most = max(one["bytes"][key] for one in of_ranks)
            values.setdefault(f"{key}_bytes", []).append(most if key == "peak" else first)
    return Measured(losses=tuple(losses), values=values)


def summarize(found: dict[str, list[Measured]]) -> dict[str, Any]:
    """Return the figures of a report from the measurements of each side's process groups."""
    stock, plugin = (_medians(found[side]) for side in SIDES)
    return {
        "losses_equal": len({run.losses for runs in found.values() for run in runs}) == 1,
        "losses": {side: [list(run.losses) for run in runs] for side, runs in found.items()},
        "stock": stock,
        "plugin": plugin,
        "ratio": {key: None if key == REST else _ratio(plugin[key], stock[key]) for key in FIGURES},
        "processes": {side: [_medians([run]) for run in runs] for side, runs in found.items()},
    }


def _ratio(plugin: float | None, stock: float | None) -> float | None:
    return None if plugin is None or not stock else round(plugin / stock, 3)


def _medians(runs: Sequence[Measured]) -> dict[str, float | None]:
    """Return the median over iterations of all ``runs``; None for parts that this side lacks."""
    pooled = {key: [v for run in runs for v in run.values.get(key, ())] for key in FIGURES}
    medians = {
        key: round(statistics.median(values), 3) if values else None
        for key, values in pooled.items()
    }
    return medians | {REST: rest_of(medians)}


def rest_of(figures: Mapping[str, float | None]) -> float | None:
    """Return the iteration time outside of all parts, None without an iteration time."""
    iteration = figures["iteration_ms"]
    if iteration is None:
        return None
    return round(iteration - sum(figures[key] or 0.0 for key in PARTS), 3)


def table_of(report: dict[str, Any]) -> Table:
    """Return the table of a report, for a terminal."""
    table = Table(
        title=title_of(report),
        title_justify="left",
        caption_justify="left",
        box=box.HORIZONTALS,  # fits 60 columns
    )
    table.caption = _spread_of(report)
    table.add_column("ms, or as said", no_wrap=True)
    for header in (*sides_of(report).values(), "ratio"):
        table.add_column(header, justify="right", no_wrap=True)
    for key, figure in FIGURES.items():
        values = [_shown(key, report[side][key]) for side in SIDES]
        ratio = report["ratio"][key]
        label = f"  {figure.label}" if key in PARTS else figure.label
        shown = "" if ratio is None else f"{ratio:.2f}"
        table.add_row(label, *values, shown, end_section=key in _ENDS_OF_SECTIONS)
    return table


def sides_of(report: dict[str, Any]) -> dict[str, str]:
    """Return the name of each side of a report."""
    other = report["workload"].get("against", "stock")
    return SIDES | {"stock": other}


def title_of(report: dict[str, Any]) -> str:
    """Return the title of a report."""
    work = report["workload"]
    equal = "the same losses" if report["losses_equal"] else f"losses differ: {_why_losses(work)}"
    how = f"{work['format']}, {work.get('optimizer', 'adam')}"
    return f"{work['recipe']}, {how}, {work['ranks']} x {report['device']}; {equal}"


def _why_losses(work: Mapping[str, Any]) -> str:
    """Return whether losses of both sides should be equal, and if not, why."""
    reasons = []
    is_bf16 = work["portable_experts"] or work.get("optimizer", "adam") == "muon"
    if (is_bf16 and work["format"] != "bf16") or work.get("compute"):
        reasons.append("the other side multiplies experts in bf16")
    if work["clip_grad"]:
        reasons.append("norms that clip are summed in another order (--clip-grad 0 leaves them)")
    if not work["deterministic"]:
        reasons.append("algorithms need not repeat (--deterministic)")
    return f"expected, as {', and '.join(reasons)}" if reasons else "not expected, please report it"


def _spread_of(report: dict[str, Any]) -> str:
    """Return lines with the spread between processes of one side."""
    lines = []
    for side, name in sides_of(report).items():
        of_runs = [run["iteration_ms"] for run in report["processes"][side]]
        times = ", ".join(_shown("iteration_ms", value) for value in of_runs)
        lines.append(f"iteration, each process of {name}: {times}")
    return "\n".join(lines)


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return spell_bytes(value) if key.endswith("_bytes") else f"{value:.2f}"
