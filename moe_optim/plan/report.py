"""The report of a plan: as tables, as JSON and as a picture."""

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from moe_optim.console.files import require_writable, write_atomically
from moe_optim.console.provenance import commit
from moe_optim.console.screen import quiet
from moe_optim.console.spelling import spell_bytes, spell_count
from moe_optim.errors import ConfigError
from moe_optim.recipes import load_recipe

if TYPE_CHECKING:
    from moe_optim.megatron.planning import PlannedExperts

# What imports torch or Megatron is imported where it is needed: it takes seconds.

STEP, MOST_STEPS = 4, 5
"""GPUs that are planned without ``--gpus``: each number so many times the last, so many times."""
STDOUT = Path("-")

_LEGEND = (
    "Bytes and launches of one rank, the one with most; launches quantize, find maxima or derive "
    "planes, once a step. max/mean: elements that ranks own. maxima: fp32 values reduced over "
    "ranks before they encode. bf16 wire: what stock gathers."
)
_STEP_LEGEND = (
    " A fused step reads gradients for their norm; its update reads them again, reads and writes "
    "masters and moments, and writes what travels: bytes of one rank, of experts alone, that have "
    "to move at least. nvfp4 reads masters once more."
)
COLUMNS = {  # header -> width
    "format": 11,
    "resident": 8,
    "gathered": 8,
    "launches": 8,
    "padding": 7,
    "max/mean": 8,
    "path": 12,
    "maxima": 8,
}
STEP_COLUMNS = {"format": 11, "norm": 8, "update": 8, "B/parameter": 11}

Row = dict[str, Any]


def plan(args: argparse.Namespace) -> int:
    """Plan, print the table or JSON, and write the files asked for; return the exit code.

    Raises:
        ConfigError: the recipe, a flag or a number of GPUs cannot be planned, or a file not
            written.
        LayoutError: a weight that a format cannot hold.
    """
    recipe = load_recipe(args.recipe, args.set)
    if (fewest := min(args.gpus or [1])) < 1:
        raise ConfigError(f"--gpus: expected 1 or more, got {fewest}.")
    require_writable(args.out, None if args.json == STDOUT else args.json)
    argv = [*recipe.megatron_argv(), *args.megatron_args]
    with Console(stderr=True).status("Importing Megatron ..."), quiet():
        from moe_optim.megatron.planning import plan_experts
        from moe_optim.plan.costs import plan_rows, why_stocks_step

    layout = recipe.moe_optim.expert_layout
    try:
        experts = plan_experts(argv, grouped=layout == "grouped")
    except ConfigError as error:
        raise ConfigError(f"{recipe.path}: {error}") from error
    gpus = sorted(set(args.gpus or default_gpus(experts, recipe.ranks)))
    reason = why_stocks_step(experts, recipe.moe_optim)
    rows = plan_rows(experts, gpus, is_fused=reason is None, tb_per_s=args.bandwidth)
    report: dict[str, Any] = {
        "command": _command(args),
        "commit": commit(),
        "planned": _describe(experts, layout),
        "step": "fused" if reason is None else f"stock, not estimated: {reason}",
        "bandwidth_tb_per_s": args.bandwidth,
        "rows": list(rows),
    }
    text = json.dumps(report, indent=2) + "\n"
    if args.json == STDOUT:
        print(text, end="")
    else:
        console = Console(markup=False, highlight=False)
        console.print(f"{args.recipe}: {report['planned']}")
        for table in _tables(report["rows"], args.bandwidth):
            console.print(table)
        console.print(f"\nstep: {report['step']}")
        console.print(f"{_LEGEND}{'' if reason else _STEP_LEGEND}", style="dim")
    if args.json not in (None, STDOUT):
        _write(args.json, text.encode())
    if args.out:
        from moe_optim.plan.picture import draw_plan

        _write(args.out, draw_plan(report["rows"], report["planned"]))
    return 0


def default_gpus(experts: "PlannedExperts", ranks: int) -> list[int]:
    """Return the recipe's ``ranks``, if they hold the model, and some numbers that make sense."""
    fewest = experts.gpus_multiple
    numbers = [fewest * STEP**step for step in range(MOST_STEPS)]
    if experts.most_micro_batches is not None:
        most = experts.most_micro_batches * experts.ranks_per_model
        numbers = [number for number in numbers if number <= max(most, fewest)]
    return numbers if ranks % fewest else [*numbers, ranks]


def _command(args: argparse.Namespace) -> str:
    words = ["moe-optim", "plan", str(args.recipe)]
    words += ["--gpus", *map(str, args.gpus)] if args.gpus else []
    words += ["--bandwidth", str(args.bandwidth)] if args.bandwidth else []
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


def _tables(rows: Sequence[Row], tb_per_s: float | None) -> Iterator[Table]:
    """Yield tables for each number of GPUs, of less than 80 columns, equally wide."""
    for gpus, group in groupby(rows, lambda row: row["gpus"]):
        of_format = list(group)
        dp_size, buckets = (of_format[0][key] for key in ("expert_data_parallel_size", "buckets"))
        table = _table(
            f"{_count(gpus, 'GPU')}, expert data parallel {dp_size:,}, {_count(buckets, 'bucket')}",
            COLUMNS,
        )
        for row in of_format:
            table.add_row(
                row["format"],
                spell_bytes(row["resident_bytes_per_rank"]),
                spell_bytes(row["gathered_bytes_per_step"]),
                str(row["launches_per_step"]),
                f"{row['padding_fraction']:.2%}",
                f"{row['shard_imbalance']:.3f}",
                row["path"],
                spell_count(row["exchanged_maxima"]),
            )
        yield table
        fused = [row for row in of_format if row["norm_bytes_per_rank"] is not None]
        if fused:
            yield _step_table(fused, tb_per_s)


def _step_table(rows: Sequence[Row], tb_per_s: float | None) -> Table:
    """Return what a fused step moves, and how long memory takes for it."""
    at = {} if tb_per_s is None else {f"at {tb_per_s:g} TB/s": 14}
    table = _table("a fused step", {**STEP_COLUMNS, **at})
    for row in rows:
        floor = [] if tb_per_s is None else [f"{row['step_floor_ms']:.3f} ms"]
        table.add_row(
            row["format"],
            spell_bytes(row["norm_bytes_per_rank"]),
            spell_bytes(row["update_bytes_per_rank"]),
            f"{row['step_bytes_per_parameter']:.2f}",
            *floor,
        )
    return table


def _table(title: str, columns: Mapping[str, int]) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for header, width in columns.items():
        side: Any = "left" if header in ("format", "path") else "right"
        table.add_column(header, justify=side, no_wrap=True, width=width)
    return table


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: expected a file to write, got: {error.strerror}.") from error
