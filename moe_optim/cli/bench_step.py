"""``moe-optim bench step``: training steps of a recipe, with the plug-in and with stock Megatron.

The two take turns, each in fresh processes with the same arguments and data, so that whatever the
machine does meanwhile happens to both. Times are Megatron's own timers.
"""

import argparse
import json
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_optim.cli.argv import keep_arguments_after_dashes
from moe_optim.config import field_names
from moe_optim.errors import ConfigError, StateError
from moe_optim.recipes import Recipe, load_recipe

# What imports torch or Megatron is imported where it is needed: it takes seconds.

SIDES = ("stock", "plugin")
WARM_UP = 3
"""Iterations at the start of a process that are not counted: caches, compilation, allocation."""
TIMERS = {  # key of the report -> Megatron's name of the timer
    "forward_backward_ms": "forward-backward",
    "optimizer_ms": "optimizer",
    "grad_copy_ms": "optimizer-copy-to-main-grad",
    "inner_step_ms": "optimizer-inner-step",
    "main_to_model_ms": "optimizer-copy-main-to-model-params",
    "gather_ms": "params-all-gather",
}
LABELS = {
    "iteration_ms": "iteration",
    "forward_backward_ms": "forward and backward",
    "optimizer_ms": "optimizer, all of it",
    "grad_copy_ms": "  gradients to masters",
    "inner_step_ms": "  Adam",
    "main_to_model_ms": "  masters to weights",
    "gather_ms": "  gather and what follows",
    "main_to_model_and_gather_ms": "  the last two together",
    "gathered_bytes": "gathered",
    "peak_bytes": "peak memory",
}

_ITERATION = re.compile(
    r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([\d.E+-]+)"
)
_TIMER = re.compile(r"^ +([a-z-]+) \.+: \(([\d.]+), ([\d.]+)\)$", re.M)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one process group showed."""

    losses: tuple[str, ...]
    """Of every iteration, as Megatron prints them."""
    figures: dict[str, list[float]]
    """Key of the report -> one value an iteration after the warm-up."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``bench step``."""
    parser = subparsers.add_parser(
        "step",
        help="training steps of a recipe, beside stock Megatron in the same run",
        description="Train a recipe for a few iterations with the plug-in and with Megatron's own "
        "optimizer, in turns, and compare Megatron's timers, bytes and memory. Arguments after "
        "`--` go to Megatron's parser, over the recipe's, on both sides.",
        usage="moe-optim bench step RECIPE [options] [-- MEGATRON ARGS]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recipe", type=Path, metavar="RECIPE", help="such as recipes/hopper_fp8_block.yaml")
    add("--against", choices=["stock"], default="stock", help="what it is compared with")
    add("--iterations", type=int, default=15, metavar="N", help="of a process (default 15)")
    add("--rounds", type=int, default=2, metavar="N", help="processes of each side (default 2)")
    add("--ranks", type=int, metavar="N", help="processes at a time (default: the recipe's)")
    changes = "change the recipe, such as moe_optim.layout=stock"
    add("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=changes)
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--out", type=Path, metavar="FILE", help="also draw the parts of a step, as a PNG")
    add("--logs", type=Path, metavar="DIR", help="keep the logs of all ranks in DIR")
    keep_arguments_after_dashes(parser)


def run(args: argparse.Namespace) -> int:
    """Measure both sides in turns, print a table, and write what was asked for."""
    if args.iterations <= WARM_UP or args.rounds < 1:
        raise ConfigError(
            f"--iterations, --rounds: expected more than {WARM_UP} and at least 1, got "
            f"{args.iterations} and {args.rounds}. The first {WARM_UP} iterations are not counted."
        )
    recipe = load_recipe(args.recipe, args.set)
    with TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        found: dict[str, list[Measured]] = {side: [] for side in SIDES}
        for number in range(args.rounds):
            for side in SIDES:
                folder = (logs / f"{number}-{side}").resolve()
                found[side].append(_measure(args, recipe, side, folder))
    report = _report(args, recipe, found)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.out:
        from moe_optim.cli.bench_step_picture import draw

        draw(report, args.out)
    Console().print(_table(report))
    return 0


def _measure(args: argparse.Namespace, recipe: Recipe, side: str, folder: Path) -> Measured:
    import torch

    from moe_optim.cli.launcher import LaunchPlan, launch
    from moe_optim.megatron.counted_steps import REPORT

    folder.mkdir(parents=True)
    ranks = args.ranks or recipe.ranks
    plan = LaunchPlan(
        entry=[
            sys.executable,
            "-m",
            "moe_optim.megatron.counted_steps",
            *_argv(args, recipe, side),
        ],
        ranks=ranks,
        logs=folder,
        cpu=not torch.cuda.is_available(),
        environment={REPORT: str(folder)},
    )
    result = launch(plan, Console(stderr=True))
    if result.failure is not None or result.stopped_by is not None:
        said = result.failure.sentence() if result.failure else "it was stopped"
        raise StateError(f"bench step: {side}: expected a run to its end, but {said}")
    texts = [plan.log(rank).read_text(errors="replace") for rank in range(ranks)]
    measured = parse(texts, (folder / "rank0.txt").read_text())
    if len(measured.losses) != args.iterations:
        raise StateError(
            f"bench step: {side}: expected {args.iterations} iterations in the log, got "
            f"{len(measured.losses)}. Keep it with --logs and look at rank0.log; the recipe has "
            "to log every iteration."
        )
    return measured


def _argv(args: argparse.Namespace, recipe: Recipe, side: str) -> list[str]:
    argv = [*recipe.megatron_argv(), "--timing-log-level", "2", "--log-interval", "1"]
    argv += ["--train-iters", str(args.iterations), *args.megatron_args]
    if side == "plugin":
        argv += ["--use-moe-grouped-optim"]
        for name in field_names():
            value = json.dumps(getattr(recipe.moe_optim, name))  # JSON is YAML too
            argv += ["--moe-optim-set", f"{name}={value}"]
    return argv


def parse(logs: Sequence[str], counted: str) -> Measured:
    """Read what a run printed.

    Args:
        logs: of all ranks. Losses and times of iterations are in one of them, timers in another.
        counted: what the first rank wrote: iteration, bytes gathered, peak bytes a line.
    """
    iterations = [match for text in logs for match in _ITERATION.findall(text)]
    figures: dict[str, list[float]] = {"iteration_ms": [float(ms) for _, ms, _ in iterations]}
    timers = [match for text in logs for match in _TIMER.findall(text)]
    for key, timer in TIMERS.items():
        figures[key] = [float(slowest) for name, _, slowest in timers if name == timer]
    lines = [line.split() for line in counted.splitlines()]
    figures["gathered_bytes"] = [float(line[1]) for line in lines]
    figures["peak_bytes"] = [float(line[2]) for line in lines]
    pairs = zip(figures["main_to_model_ms"], figures["gather_ms"], strict=False)
    figures["main_to_model_and_gather_ms"] = [sum(pair) for pair in pairs]
    return Measured(
        losses=tuple(loss for _, _, loss in iterations),
        figures={key: values[WARM_UP:] for key, values in figures.items()},
    )


def _report(
    args: argparse.Namespace, recipe: Recipe, found: dict[str, list[Measured]]
) -> dict[str, Any]:
    import torch

    from moe_optim.cli.bench import commit

    sides = {side: _medians(runs) for side, runs in found.items()}
    stock, plugin = (sides[side] for side in SIDES)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "command": _command(args),
        "commit": commit(),
        "device": device,
        "workload": {
            "recipe": str(recipe.path),
            "format": recipe.moe_optim.format,
            "ranks": args.ranks or recipe.ranks,
            "iterations": args.iterations - WARM_UP,
            "rounds": args.rounds,
        },
        "losses_equal": len({run.losses for runs in found.values() for run in runs}) == 1,
        "losses": {side: [list(run.losses) for run in runs] for side, runs in found.items()},
        "stock": stock,
        "plugin": plugin,
        "ratio": {key: _ratio(plugin[key], stock[key]) for key in LABELS},
    }


def _ratio(plugin: float | None, stock: float | None) -> float | None:
    return round(plugin / stock, 3) if plugin and stock else None


def _medians(runs: Sequence[Measured]) -> dict[str, float | None]:
    """Return the median over iterations of all processes; None for what no log has."""
    pooled = {key: [v for run in runs for v in run.figures[key]] for key in LABELS}
    return {
        key: round(statistics.median(values), 3) if values else None
        for key, values in pooled.items()
    }


def _command(args: argparse.Namespace) -> str:
    words = ["moe-optim", "bench", "step", str(args.recipe), "--against", args.against]
    words += ["--iterations", str(args.iterations), "--rounds", str(args.rounds)]
    words += ["--ranks", str(args.ranks)] if args.ranks else []
    words += ["--set", *args.set] if args.set else []
    words += ["--json", str(args.json)] if args.json else []
    words += ["--", *args.megatron_args] if args.megatron_args else []
    return shlex.join(words)


def _table(report: dict[str, Any]) -> Table:
    work = report["workload"]
    equal = "the same losses" if report["losses_equal"] else "losses differ"
    title = (
        f"{work['recipe']}, {work['ranks']} x {report['device']}; ms, medians of "
        f"{work['iterations'] * work['rounds']} iterations; {equal}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for header in ("stock", "plug-in", "ratio"):
        table.add_column(header, justify="right")
    for key, label in LABELS.items():
        values = [_shown(key, report[side][key]) for side in SIDES]
        ratio = report["ratio"][key]
        table.add_row(label, *values, "" if ratio is None else f"{ratio:.2f}")
    return table


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**30:.2f} GiB" if key.endswith("_bytes") else f"{value:.1f}"
