"""The report of a plan: as tables, as JSON and as a picture."""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
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
        from moe_optim.plan.costs import plan_rows

    layout = recipe.moe_optim.expert_layout
    try:
        experts = plan_experts(argv, grouped=layout == "grouped")
    except ConfigError as error:
        raise ConfigError(f"{recipe.path}: {error}") from error
    gpus = sorted(set(args.gpus or default_gpus(experts, recipe.ranks)))
    report: dict[str, Any] = {
        "command": _command(args),
        "commit": commit(),
        "planned": _describe(experts, layout),
        "rows": list(plan_rows(experts, gpus)),
    }
    text = json.dumps(report, indent=2) + "\n"
    if args.json == STDOUT:
        print(text, end="")
    else:
        console = Console(markup=False, highlight=False)
        console.print(f"{args.recipe}: {report['planned']}")
        for table in _tables(report["rows"]):
            console.print(table)
        console.print(f"\n{_LEGEND}", style="dim")
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


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield a table for each number of GPUs, of less than 80 columns, equally wide."""
    for gpus, group in groupby(rows, lambda row: row["gpus"]):
        of_format = list(group)
        dp_size, buckets = (of_format[0][key] for key in ("expert_data_parallel_size", "buckets"))
        table = Table(
            title=f"\n{_count(gpus, 'GPU')}, expert data parallel {dp_size:,}, "
            f"{_count(buckets, 'bucket')}",
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for header, width in COLUMNS.items():
            side: Any = "left" if header in ("format", "path") else "right"
            table.add_column(header, justify=side, no_wrap=True, width=width)
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


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: expected a file to write, got: {error.strerror}.") from error
