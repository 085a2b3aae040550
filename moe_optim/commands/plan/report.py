"""The report of a plan: as JSON and as a picture, which are written first, and as tables."""

import argparse
import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optim.commands.console.files import require_writable, write_atomically
from moe_optim.commands.console.provenance import commit
from moe_optim.config.recipes import Recipe, load_recipe
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

if TYPE_CHECKING:
    from moe_optim.commands.plan.experts import PlannedExperts

# What imports numpy is imported where it is needed, as the parser of all commands reads this file.

STEP, MOST_STEPS = 4, 5
"""GPUs that are planned without ``--gpus``: each number so many times the last, so many times."""
STDOUT = Path("-")

Row = dict[str, Any]


def plan(args: argparse.Namespace) -> int:
    """Plan, write the files asked for, and print the tables or JSON; return the exit code.

    Raises:
        ConfigError: the recipe, a flag or a number of GPUs cannot be planned, or a file not
            written.
        LayoutError: a weight that a format cannot hold.
    """
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
    """Return what the JSON file holds; raises as :func:`plan`."""
    from moe_optim.commands.plan.answers import find_choice, recommend
    from moe_optim.commands.plan.costs import plan_rows
    from moe_optim.commands.plan.experts import plan_experts
    from moe_optim.rules import Setup, config_with_flags, why_stock_step

    argv = [*recipe.megatron_argv(), *args.megatron_args]
    knobs = recipe.moe_optim
    try:
        experts = plan_experts(
            argv,
            grouped=knobs.expert_layout == "grouped",
            stores_in_te=knobs.storage == "transformer_engine",
        )
    except ConfigError as error:
        raise ConfigError(f"{recipe.path}: {error}") from error
    knobs = config_with_flags(knobs, experts)
    gpus = sorted(set(args.gpus or default_gpus(experts, recipe.ranks)))
    # where no weight is quantized Adam may hold masters, and such rows are stock's
    reason = why_stock_step(Setup(config=knobs, optimizer=experts, masters_of_adam=False))
    if reason and (knobs.offload_states or experts.optimizer_cpu_offload):
        raise ConfigError(
            f"{recipe.path}: states on the host: expected a fused step, got {reason}. Remove that, "
            "or leave them on the device."
        )
    rows = list(
        plan_rows(
            experts,
            gpus,
            is_fused=reason is None,
            offload_states=knobs.offload_states,
            memory_tb_per_s=args.memory_bandwidth,
            network_gb_per_s=args.bandwidth,
        )
    )
    advised = recipe.ranks if recipe.ranks in gpus else gpus[0]
    choice = find_choice(recipe, argv, experts)
    of_advised = [row for row in rows if row["gpus"] == advised]
    return {
        "command": _command(args),
        "commit": commit(),
        "planned": _describe(experts, knobs.expert_layout),
        "recommended": recommend(choice, of_advised, args.gpu_memory),
        "step": "fused" if reason is None else f"stock, not estimated: {reason}",
        "gpu_memory_gib": args.gpu_memory,
        "bandwidth_gb_per_s": args.bandwidth,
        "memory_bandwidth_tb_per_s": args.memory_bandwidth,
        "rows": rows,
    }


def _print(args: argparse.Namespace, report: Mapping[str, Any]) -> None:
    from moe_optim.commands.plan.tables import Shown, build_tables, legend

    console = results_console()
    shown = Shown(
        gpu_memory=args.gpu_memory,
        network_gb_per_s=args.bandwidth,
        memory_tb_per_s=args.memory_bandwidth,
        details=args.details,
    )
    say = functools.partial(console.print, soft_wrap=False)
    say(f"{args.recipe}: {report['planned']}")
    for _, group in groupby(report["rows"], lambda row: row["gpus"]):
        rows: Sequence[Row] = list(group)
        for table in build_tables(_title(rows[0]), rows, shown, console.width):
            print_table(console, table)
    say(f"\nstep: {report['step']}")
    say(legend(shown, report["rows"]), style="dim")
    say(f"\n{report['recommended']}")


def _title(row: Row) -> str:
    dp_size, buckets = row["expert_data_parallel_size"], row["buckets"]
    return (
        f"{_count(row['gpus'], 'GPU')}, expert data parallel {dp_size:,}, "
        f"{_count(buckets, 'bucket')}"
    )


def default_gpus(experts: "PlannedExperts", ranks: int) -> list[int]:
    """Return the recipe's ``ranks``, if they hold the model, and some numbers that make sense."""
    from moe_optim.commands.plan.experts import MOST_RANKS

    fewest = experts.gpus_multiple
    numbers = [fewest * STEP**step for step in range(MOST_STEPS)]
    numbers = [number for number in numbers if number <= max(MOST_RANKS, fewest)]
    if experts.most_micro_batches is not None:
        most = experts.most_micro_batches * experts.ranks_per_model
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
    """Say what the rows are about."""
    (_, (count, *first)), (_, (_, *second)) = experts.weights
    stage = "all" if experts.pipeline == 1 else f"stage {experts.stage} of {experts.pipeline}, with"
    return (
        f"{stage} {experts.layers} MoE layers, {count} experts a rank of {first} and {second}, "
        f"{layout}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
