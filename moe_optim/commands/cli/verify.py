"""Compare all tensors of two checkpoints of any format, in bounded memory.

Experts are compared bitwise in one layout and row order. Exits with 0 if all tensors are equal,
with 1 if some differ or states could not be compared, with 2 if a checkpoint cannot be read.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from moe_optim.commands.cli.options import add_naming, add_source
from moe_optim.commands.console.checkpoint_paths import find_checkpoint
from moe_optim.commands.console.checkpoint_progress import open_view, progress_bar
from moe_optim.commands.console.tables import build_table
from moe_optim.commands.console.workers import add_workers, number_of_workers
from moe_optim.screen import print_table, results_console
from moe_optim.spelling import spell_bytes

if TYPE_CHECKING:
    from moe_optim.commands.conversion.comparison import Comparison, Difference

DIFFERENT = 1  # or not known to be equal
SHOWN = 20
"""Maximum number of differences in the table; the JSON contains all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_source(parser, "a", "A")
    add_source(parser, "b", "B")
    add = parser.add_argument
    add("--json", action="store_true", help="print all results as JSON")
    add("--weights-only", action="store_true", help="ignore optimizer states")
    add_naming(parser, "A")
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, print the differences, and return 1 if any exist or states were skipped unasked."""
    for path in (args.a, args.b):  # before the import of torch, which takes seconds
        find_checkpoint(path)
    from moe_optim.commands.conversion.comparison import compare_checkpoints, find_side

    views = [open_view(args.a, args.rename), open_view(args.b)]
    sides = [
        find_side(view, num_experts=args.num_experts, weights_only=args.weights_only)
        for view in views
    ]
    total = views[0].nbytes(views[0].tensors)
    workers = number_of_workers(args.workers, total)
    with progress_bar("comparing", total) as report:
        found = compare_checkpoints(sides[0], sides[1], report, workers=workers)
    if args.json:
        result: dict[str, Any] = asdict(found) | {"equal": found.equal}
        for one in result["differences"]:
            one["largest"] = None if one["largest"] == math.inf else one["largest"]
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        _print(found)
    return 0 if found.equal else DIFFERENT


def _print(found: "Comparison") -> None:
    console = results_console()
    for note in found.notes:
        console.print(note, style="dim")
    size = spell_bytes(found.nbytes)
    if found.equal is None:
        console.print(
            f"no difference in {found.tensors:,} tensors, {size}, but not all were compared: "
            "--weights-only ignores states",
            style="yellow",
        )
        return
    if found.equal:
        console.print(f"equal: {found.tensors:,} tensors, {size}, bit by bit", style="green")
        return
    print_table(console, _table(found.differences[:SHOWN]))
    if len(found.differences) > SHOWN:
        console.print(f"and {len(found.differences) - SHOWN:,} more: --json lists all")
    count = len(found.differences)
    many = "s" * (count > 1)
    console.print(
        f"not equal: {count:,} difference{many} in {found.tensors:,} tensors, {size}", style="red"
    )


def _table(differences: "Sequence[Difference]") -> Table:
    numbers = ("expert", "elements", "first at", "largest")
    rows: list[tuple[str, ...]] = []
    last = ""
    for one in differences:
        if one.what != "values":
            rows.append((": ".join(filter(None, (one.name, one.what, one.detail))), *["-"] * 4))
        else:
            name = one.name * (one.name != last)
            largest = "-" if one.largest is None else f"{one.largest:.3g}"
            expert = "-" if one.expert is None else str(one.expert)
            counts = f"{one.differing:,} of {one.elements:,}"
            rows.append((name, expert, counts, f"[{', '.join(map(str, one.first))}]", largest))
        last = one.name
    return build_table(("tensor", *numbers), rows, right=numbers, fold=("tensor",))
