"""Show what the expert weights of a recipe cost, format by format, without a GPU.

Lays out the expert weights as a run would, of the pipeline stage with most of them, and shows
memory, gathered bytes and launches of every format, beside Megatron's own, and which format to
take. Of the recipe it reads megatron_args, expert_layout, storage and who takes steps: step,
layout, backend. Megatron need not be installed. Arguments after `--` go to Megatron's parser, over
the recipe's.
"""

import argparse
from pathlib import Path

from moe_optim.commands.console.pictures import picture_path
from moe_optim.commands.plan.report import STDOUT, STEP
from moe_optim.integration.argv import add_changes, add_recipe

HELP = "show what the expert weights of a recipe cost, format by format, without a GPU"
USAGE = "moe-optim plan RECIPE [options] [-- MEGATRON ARGS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_recipe(parser, "quickstart")
    add(
        "--gpus",
        type=int,
        nargs="+",
        metavar="N",
        help="how many there are in all (default: the recipe's ranks, and from the fewest that "
        f"hold the model on, {STEP} times as many each, while a batch has samples for all)",
    )
    add(
        "--gpu-memory",
        type=_positive,
        metavar="GIB",
        help="memory of a GPU: also say whether the experts fit, and what they leave",
    )
    add(
        "--bandwidth",
        type=_positive,
        metavar="GB/S",
        help="bus bandwidth of an all-gather between expert data parallel ranks, as nccl-tests "
        "print it: also show how long the parameter all-gather takes, by itself",
    )
    add(
        "--memory-bandwidth",
        type=_positive,
        metavar="TB/S",
        help="terabytes that the memory of a GPU reads and writes in a second: also show how long "
        "a fused step takes at that speed (`python -m benchmarks requantize` measures it)",
    )
    add("--details", action="store_true", help="also show padding, cut blocks and a fused step")
    add_changes(parser, "moe_optim.expert_layout=indexed")
    add(
        "--out",
        type=picture_path,
        metavar="FILE",
        help="also draw bytes against GPUs: .png, .svg, .pdf or .jpg",
    )
    add(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the rows, with the parts they consist of, to FILE, or print them as JSON",
    )


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return number


def run(args: argparse.Namespace) -> int:
    """Plan, write the files asked for, and print the tables or JSON."""
    from moe_optim.commands.plan.report import plan

    return plan(args)
