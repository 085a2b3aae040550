"""Show the cost of a recipe's expert weights in each format, without a GPU.

Lays out the expert weights of the pipeline stage with most of them as a run would. Shows memory,
gathered bytes and kernel launches for each format and for stock Megatron, and recommends a format.
Reads megatron_args, expert_layout, storage, step, layout and backend from the recipe. Megatron need
not be installed. Arguments after `--` are passed to Megatron's parser and override the recipe's.
"""

import argparse
from pathlib import Path

from moe_optim.commands.console.pictures import picture_path
from moe_optim.commands.plan.report import STDOUT, STEP
from moe_optim.integration.argv import add_changes, add_recipe

HELP = "show the cost of a recipe's expert weights in each format, without a GPU"
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
        help="total numbers of GPUs (default: the recipe's ranks, and the minimum for the model "
        f"times powers of {STEP}, up to the batch size)",
    )
    add(
        "--gpu-memory",
        type=_positive,
        metavar="GIB",
        help="memory of a GPU: also show whether the experts fit, and the rest",
    )
    add(
        "--bandwidth",
        type=_positive,
        metavar="GB/S",
        help="bus bandwidth of an all-gather over expert data parallel ranks, as in nccl-tests: "
        "also show the time of the parameter all-gather, without overlap",
    )
    add(
        "--memory-bandwidth",
        type=_positive,
        metavar="TB/S",
        help="memory bandwidth of a GPU in TB/s: also show the time of a fused step at that "
        "bandwidth (`python -m benchmarks requantize` measures it)",
    )
    add("--details", action="store_true", help="also show padding, cut blocks and a fused step")
    add_changes(parser, "moe_optim.expert_layout=indexed")
    add(
        "--out",
        type=picture_path,
        metavar="FILE",
        help="plot of bytes against GPUs to write: .png, .svg, .pdf or .jpg",
    )
    add(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the rows and their components to FILE, or print them as JSON",
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
    """Plan, write the requested files, and print the tables or JSON."""
    from moe_optim.commands.plan.report import plan

    return plan(args)
