"""The report of a plan: JSON, written first, and tables."""

import argparse
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.commands.console.files import STDOUT, write_atomically
from moe_optim.commands.console.provenance import commit
from moe_optim.commands.plan.answers import (
    explain,
    explain_fit,
    find_choice,
    flags_to_add,
    recommend,
)
from moe_optim.commands.plan.costs import STOCK_BF16, left_out
from moe_optim.commands.plan.dense import count_dense
from moe_optim.commands.plan.experts import MOST_RANKS, PlannedExperts, plan_experts
from moe_optim.commands.plan.gpus import GPUS, STEP, Hardware
from moe_optim.commands.plan.rows import plan_rows
from moe_optim.commands.plan.saves import count_save, explain_save
from moe_optim.commands.plan.step_times import FUSED_ERROR, UTILIZATION
from moe_optim.commands.plan.tables import build_tables
from moe_optim.config.recipes import Recipe, load_recipe
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS
from moe_optim.integration.arguments import add_moe_optim_arguments
from moe_optim.rules import Setup, check_setup, config_with_flags, why_stock_step
from moe_optim.screen import print_table, results_console
from moe_optim.spelling import spell_number

_MOST_STEPS = 5
"""Most numbers of GPUs by default."""


class Planned(NamedTuple):
    """What a plan is made of: a recipe with the plug-in's flags applied, Megatron's, experts."""

    recipe: Recipe
    argv: Sequence[str]
    experts: PlannedExperts
    layout: str


def plan(args: argparse.Namespace) -> int:
    """Plan, write the requested files, print the tables or JSON, and return the exit code."""
    if args.recipe is None and not args.megatron_args:
        raise ConfigError(
            "plan: expected a recipe, or Megatron's flags after --, got neither. Write for example "
            "moe-optim plan quickstart."
        )
    if (fewest := min(args.gpus or [1])) < 1:
        raise ConfigError(f"--gpus: expected 1 or more, got {fewest}.")
    planned = read_plan(args.recipe, args.set, args.megatron_args)
    require_writable(None if args.json == STDOUT else args.json)
    report = make_report(args, planned)
    text = json.dumps(report, indent=2) + "\n"
    if args.json not in (None, STDOUT):
        write_atomically(args.json, text.encode())
    if args.json == STDOUT:
        print(text, end="")
    else:
        _print(args, report)
    return 0


def read_plan(path: Path | None, overrides: Sequence[str], words: Sequence[str]) -> Planned:
    """Read a recipe, if there is one, and flags: Megatron's, and the plug-in's among them.

    Without a recipe or ``expert_layout``, Transformer Engine's experts are one parameter each, as
    it builds them.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    own, further = add_moe_optim_arguments(parser).parse_known_args(list(words))
    recipe = load_recipe(path, overrides)
    config = recipe.moe_optim
    if own.moe_optim_recipe:
        config = load_recipe(own.moe_optim_recipe).moe_optim
    recipe = replace(recipe, moe_optim=config.replace_from(own.moe_optim_set))
    config, argv = recipe.moe_optim, [*recipe.megatron_argv(), *further]
    layout: str = config.expert_layout
    is_given = any("expert_layout=" in word for word in (*overrides, *own.moe_optim_set))
    try:
        experts = plan_experts(
            argv,
            grouped=layout == "grouped",
            stores_in_te=config.storage == "transformer_engine",
        )
    except ConfigError as error:
        where = f"{recipe.path} and flags after --" if path and words else recipe.path
        raise ConfigError(f"{where}: {error}") from error
    if path is None and not is_given and not experts.is_portable:
        is_single = experts.args.moe_single_grouped_weight
        layout = "grouped" if is_single else "indexed"
        experts = replace(experts, grouped=is_single)
    return Planned(recipe, argv, experts, layout)


def estimated_rows(
    planned: Planned,
    gpus: Sequence[int],
    hardware: Hardware,
    formats: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return ``rows``, ``step`` and ``not_counted`` of a report, see :func:`make_report`.

    ``formats`` names the rows; None for all.
    """
    recipe, experts = planned.recipe, planned.experts
    config = config_with_flags(recipe.moe_optim, experts.optimizer)
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
    dense, not_counted = None, None
    try:
        dense = count_dense(experts.args)
    except ConfigError as error:
        not_counted = str(error)
    rows = plan_rows(
        experts, gpus, config, hardware, dense, is_fused=reason is None, formats=formats
    )
    step = "fused" if reason is None else f"stock, not estimated: {reason}"
    if experts.has_muon and reason is None:
        step += ", not estimated: Muon's iteration takes time for arithmetic, not for bytes"
    return {"step": step, "not_counted": not_counted, "rows": list(rows)}


def make_report(args: argparse.Namespace, planned: Planned) -> dict[str, Any]:
    """Return the content of the JSON file."""
    recipe, experts, hardware = planned.recipe, planned.experts, Hardware.of_options(args)
    gpus = sorted(set(args.gpus or default_gpus(experts, recipe.ranks)))
    choice = find_choice(recipe, planned.argv, experts, args.gpu)
    shown = choice.rows_to_show()
    has_all = args.details or args.json is not None
    counted = estimated_rows(planned, gpus, hardware, None if has_all else shown)
    advised = recipe.ranks if recipe.ranks in gpus else gpus[0]
    rows = [row for row in counted["rows"] if row["gpus"] == advised]
    best = recommend(choice, rows)
    format = FORMATS.get(best["format"] if best else choice.own)
    fit = None
    if hardware.memory_gib is not None:
        row = best or next(row for row in rows if row["format"] == STOCK_BF16)
        fit = explain_fit(row, hardware.memory_gib, counted["not_counted"] or "")
    return {
        "command": shlex.join(["moe-optim", *args.argv]),
        "commit": commit(),
        "planned": _describe(experts, planned.layout),
        "recommended": explain(choice, best, rows),
        "save": {"gpus": advised} | count_save(experts, advised, format),
        "missing_gemms": choice.missing_gemms,
        "fits": fit,
        "flags": flags_to_add(choice, best, recipe.moe_optim, hardware.gpu),
        "shown": shown,
        "left_out": left_out(experts),
        "gpu": args.gpu,
        "gpu_memory_gib": hardware.memory_gib,
        "memory_bandwidth_tb_per_s": hardware.memory_tb_per_s,
        **counted,
    }


def _print(args: argparse.Namespace, report: Mapping[str, Any]) -> None:
    console = results_console()
    name = f"{args.recipe}: " if args.recipe else ""
    console.print(f"{name}{report['planned']}", soft_wrap=False)
    shown = [row for row in report["rows"] if args.details or row["format"] in report["shown"]]
    for _, group in groupby(shown, lambda row: row["gpus"]):
        rows: list[dict[str, Any]] = list(group)
        gpus = spell_number(rows[0]["gpus"], "GPU")
        buckets = spell_number(rows[0]["buckets"], "bucket")
        ranks = rows[0]["expert_data_parallel_size"]
        title = f"{gpus}, expert data parallel {ranks:,}, {buckets}"
        for table in build_tables(title, report, rows, console.width, details=args.details):
            print_table(console, table)
    notes = [] if report["step"] == "fused" else [f"step: {report['step']}"]
    if any(row["step_ms"] for row in shown):
        is_blackwell = report["gpu"] is not None and GPUS[report["gpu"]].is_blackwell
        notes.append(
            f"step: estimated without all-gather; the estimate is within {FUSED_ERROR:.0%} of our "
            f"H100 and H200 runs in blockwise FP8{', not measured on Blackwell' * is_blackwell}"
        )
        notes.append(
            "iteration: not estimated. The plan models neither GEMMs nor activations, and our "
            f"runs reach at most {UTILIZATION:.0%} of peak bf16 FLOPS, too little to extrapolate; "
            "`python -m benchmarks step RECIPE` measures it"
        )
    if report["not_counted"]:
        notes.append(f"model: dense weights are not counted: {report['not_counted']}")
    for reason in dict.fromkeys(report["left_out"].values()):
        names = [name for name, one in report["left_out"].items() if one == reason]
        notes += [f"not shown: {', '.join(names)}: {reason}"] * args.details
    console.print()
    for note in notes:
        console.print(f"{note}.", style="dim", soft_wrap=False)
    console.print(report["recommended"], soft_wrap=False)
    for answer in ("missing_gemms", "fits"):
        if report[answer]:
            console.print(report[answer], soft_wrap=False)
    console.print(explain_save(report["save"]), soft_wrap=False)
    if report["flags"]:
        console.print(f"\nAdd these flags:\n  {shlex.join(report['flags'])}")


def default_gpus(experts: PlannedExperts, ranks: int) -> list[int]:
    """Return numbers of GPUs that fit the model and the batch size, including ``ranks``."""
    fewest = experts.gpus_multiple
    numbers = [fewest * STEP**step for step in range(_MOST_STEPS)]
    fitting = [one for one in numbers if one <= MOST_RANKS and not experts.batch_fault(one)]
    fitting = fitting or [fewest]
    return fitting if ranks % fewest else [*fitting, ranks]


def _describe(experts: PlannedExperts, layout: str) -> str:
    (_, (count, *first)), (_, (_, *second)) = experts.weights
    pipeline = experts.args.pipeline_model_parallel_size
    stage = "all" if pipeline == 1 else f"stage {experts.stage} of {pipeline}, with"
    return (
        f"{stage} {experts.layers} MoE layers, {count} experts per rank of {first} and {second}, "
        f"{layout}{', Muon' * experts.has_muon}"
    )
