"""``moe-optim plan``: what the expert weights of a recipe cost at any number of GPUs."""

import argparse
from pathlib import Path

from moe_optim.console.argv import add_changes, add_recipe
from moe_optim.plan.report import STDOUT, STEP


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``plan`` command."""
    parser = subparsers.add_parser(
        "plan",
        help="show what the expert weights of a recipe cost, format by format, without a GPU",
        description="Lay out the expert weights of a recipe as a run would, of the pipeline stage "
        "with most of them, and show memory, gathered bytes and launches of every format, beside "
        "Megatron's own MXFP8 and bf16, and what a fused step has to move. Of the recipe it reads "
        "megatron_args, expert_layout and who takes steps: step, layout, backend. "
        "Arguments after `--` go to Megatron's parser, over the recipe's.",
        usage="moe-optim plan RECIPE [options] [-- MEGATRON ARGS]",
        allow_abbrev=False,
    )
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
        "--bandwidth",
        type=_bandwidth,
        metavar="TB/S",
        help="terabytes that the memory of a GPU reads and writes in a second: also show how long "
        "a fused step takes at that speed (`moe-optim bench requantize` measures it)",
    )
    add_changes(parser, "moe_optim.expert_layout=indexed")
    add("--out", type=Path, metavar="FILE", help="also draw bytes against GPUs, as a PNG")
    add(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the rows, with the parts they consist of, to FILE, or print them as JSON",
    )


def _bandwidth(text: str) -> float:
    """Return terabytes a second."""
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"expected terabytes a second above 0, got '{text}'")
    return speed


def run(args: argparse.Namespace) -> int:
    """Plan, print the table or JSON, and write the files asked for."""
    from moe_optim.plan.report import plan

    return plan(args)
