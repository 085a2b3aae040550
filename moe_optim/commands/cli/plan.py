"""Show what a model costs in each format, without a GPU: memory, all-gather and optimizer step.

Lays out the expert weights of the pipeline stage with most of them as a run would, adds the dense
weights, compares every format with stock Megatron, and ends with the flags to add. Megatron need
not be installed. Arguments after `--` are Megatron's, such as those of a training script; they
override the recipe's.
"""

import argparse
from pathlib import Path

from moe_optim.commands.console.pictures import picture_path
from moe_optim.commands.plan.gpus import GPUS
from moe_optim.commands.plan.legend import legend
from moe_optim.commands.plan.report import STDOUT, STEP
from moe_optim.integration.argv import add_changes, add_recipe

HELP = "show memory, all-gather and step time of a model in each format, without a GPU"
USAGE = "moe-optim plan [RECIPE] [options] [-- MEGATRON ARGS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_recipe(parser, "quickstart", nargs="?")
    parser.epilog, parser.formatter_class = legend(), argparse.RawDescriptionHelpFormatter
    add(
        "--gpus",
        type=int,
        nargs="+",
        metavar="N",
        help="total numbers of GPUs (default: the recipe's ranks, and the minimum for the model "
        f"times powers of {STEP}, up to the batch size)",
    )
    add(
        "--gpu",
        choices=GPUS,
        help="kind of GPU, by its data sheet: memory, memory bandwidth, and the link that the "
        "all-gather uses (NVLink, or one network port per GPU)",
    )
    add(
        "--gpu-memory",
        type=_positive,
        metavar="GIB",
        help="memory of a GPU, in place of --gpu's: show whether the model fits, and the rest",
    )
    add(
        "--bandwidth",
        type=_positive,
        metavar="GB/S",
        help="bus bandwidth of an all-gather over expert data parallel ranks, as in nccl-tests, in "
        "place of --gpu's: show the time of the parameter all-gather, without overlap",
    )
    add(
        "--memory-bandwidth",
        type=_positive,
        metavar="TB/S",
        help="memory bandwidth of a GPU by its data sheet, in place of --gpu's: show the estimated "
        "time of optimizer.step()",
    )
    add("--details", action="store_true", help="show all formats and columns")
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
