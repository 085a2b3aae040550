"""The report of a plan: JSON and plot, written first, and tables."""

import argparse
import json
import shlex
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.commands.console.files import write_atomically
from moe_optim.commands.console.provenance import commit
from moe_optim.config.recipes import Recipe, load_recipe
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

if TYPE_CHECKING:
    from moe_optim.commands.plan.experts import PlannedExperts

# Modules that import numpy are imported locally, because the parser imports this module.

STEP, MOST_STEPS = 4, 5
"""Default numbers of GPUs: ratio of successive numbers, and how many."""
STDOUT = Path("-")


def plan(args: argparse.Namespace) -> int:
    """Plan, write the requested files, print the tables or JSON, and return the exit code."""
    recipe = load_recipe(args.recipe, args.set)
    if (fewest := min(args.gpus or [1])) < 1:
        raise ConfigError(f"--gpus: expected 1 or more, got {fewest}.")
    require_writable(args.out, None if args.json == STDOUT else args.json)
    report = make_report(args, recipe)
    text = json.dumps(report, indent=2) + "\n"
    if args.json not in (None, STDOUT):
        write_atomically(args.json, text.encode())
    if args.out:
        from moe_optim.commands.plan.picture import draw_plan

        write_atomically(args.out, draw_plan(report, args.out))
    if args.json == STDOUT:
        print(text, end="")
    else:
        _print(args, report)
    return 0


def make_report(args: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return the content of the JSON file."""
    from moe_optim.commands.plan.answers import find_choice, recommend
    from moe_optim.commands.plan.costs import left_out, plan_rows
    from moe_optim.commands.plan.experts import plan_experts
    from moe_optim.rules import Setup, check_setup, config_with_flags, why_stock_step

    argv = [*recipe.megatron_argv(), *args.megatron_args]
    config = recipe.moe_optim
    try:
        experts = plan_experts(
            argv,
            grouped=config.expert_layout == "grouped",
            stores_in_te=config.storage == "transformer_engine",
        )
    except ConfigError as error:
        raise ConfigError(f"{recipe.path}: {error}") from error
    config = config_with_flags(config, experts.optimizer)
    gpus = sorted(set(args.gpus or default_gpus(experts, recipe.ranks)))
    # Adam may hold masters if no weight is quantized; such rows are stock's
    setup = Setup(config=config, optimizer=experts.optimizer, masters_of_adam=False)
    reason = why_stock_step(setup)
    if experts.has_muon:
        check_setup(setup, str(recipe.path))
    if reason and (config.offload_states or experts.args.optimizer_cpu_offload):
        raise ConfigError(
            f"{recipe.path}: states on the host: expected a fused step, got {reason}. Remove that, "
            "or leave them on the device."
        )
    rows = list(
        plan_rows(
            experts,
            gpus,
            is_fused=reason is None,
            offload_states=config.offload_states,
            memory_tb_per_s=args.memory_bandwidth,
            network_gb_per_s=args.bandwidth,
        )
    )
    advised = recipe.ranks if recipe.ranks in gpus else gpus[0]
    of_advised = [row for row in rows if row["gpus"] == advised]
    return {
        "command": _command(args),
        "commit": commit(),
        "planned": _describe(experts, config.expert_layout),
        "recommended": recommend(find_choice(recipe, argv, experts), of_advised, args.gpu_memory),
        "step": _describe_step(experts, reason),
        "left_out": left_out(experts),
        "gpu_memory_gib": args.gpu_memory,
        "bandwidth_gb_per_s": args.bandwidth,
        "memory_bandwidth_tb_per_s": args.memory_bandwidth,
        "rows": rows,
    }


def _print(args: argparse.Namespace, report: Mapping[str, Any]) -> None:
    from moe_optim.commands.plan.tables import build_tables, legend

    console = results_console()
    console.print(f"{args.recipe}: {report['planned']}", soft_wrap=False)
    for _, group in groupby(report["rows"], lambda row: row["gpus"]):
        rows: list[dict[str, Any]] = list(group)
        dp_size = rows[0]["expert_data_parallel_size"]
        title = (
            f"{_count(rows[0]['gpus'], 'GPU')}, expert data parallel {dp_size:,}, "
            f"{_count(rows[0]['buckets'], 'bucket')}"
        )
        for table in build_tables(title, report, rows, console.width, details=args.details):
            print_table(console, table)
    console.print(f"\nstep: {report['step']}", soft_wrap=False)
    console.print(legend(report, details=args.details), style="dim", soft_wrap=False)
    for reason in dict.fromkeys(report["left_out"].values()):
        names = [name for name, one in report["left_out"].items() if one == reason]
        console.print(f"without {', '.join(names)}: {reason}.", style="dim", soft_wrap=False)
    console.print(f"\n{report['recommended']}", soft_wrap=False)


def default_gpus(experts: "PlannedExperts", ranks: int) -> list[int]:
    """Return numbers of GPUs that fit the model and the batch size, including ``ranks``."""
    from moe_optim.commands.plan.experts import MOST_RANKS

    args, fewest = experts.args, experts.gpus_multiple
    most = MOST_RANKS
    if args.global_batch_size and args.micro_batch_size:
        ranks_per_model = (
            args.tensor_model_parallel_size
            * args.pipeline_model_parallel_size
            * args.context_parallel_size
        )
        micro_batches = max(1, args.global_batch_size // args.micro_batch_size)
        most = min(most, micro_batches * ranks_per_model)
    numbers = [fewest * STEP**step for step in range(MOST_STEPS)]
    numbers = [number for number in numbers if number <= max(most, fewest)]
    return numbers if ranks % fewest else [*numbers, ranks]


def _command(args: argparse.Namespace) -> str:
    words = ["moe-optim", "plan", str(args.recipe)]
    words += ["--gpus", *map(str, args.gpus)] if args.gpus else []
    for option in ("gpu_memory", "bandwidth", "memory_bandwidth"):
        value = getattr(args, option)
        words += [f"--{option.replace('_', '-')}", f"{value:g}"] if value else []
    words += ["--set", *args.set] if args.set else []
    words += ["--", *args.megatron_args] if args.megatron_args else []
    return shlex.join(words)


def _describe(experts: "PlannedExperts", layout: str) -> str:
    (_, (count, *first)), (_, (_, *second)) = experts.weights
    pipeline = experts.args.pipeline_model_parallel_size
    stage = "all" if pipeline == 1 else f"stage {experts.stage} of {pipeline}, with"
    return (
        f"{stage} {experts.layers} MoE layers, {count} experts per rank of {first} and {second}, "
        f"{layout}{', Muon' * experts.has_muon}"
    )


def _describe_step(experts: "PlannedExperts", reason: str | None) -> str:
    if reason is not None:
        return f"stock, not estimated: {reason}"
    if experts.has_muon:
        return "fused, not estimated: Muon's iteration takes time for arithmetic, not for bytes"
    return "fused"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
