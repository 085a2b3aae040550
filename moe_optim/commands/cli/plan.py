"""Show what a model costs in each format, without a GPU: memory, all-gather and optimizer step.

Lays out the expert weights of the pipeline stage with most of them as a run would, adds the dense
weights, compares every format with stock Megatron, and ends with the flags to add. Megatron need
not be installed. Arguments after `--` are Megatron's, such as those of a training script; they
override the recipe's.
"""

import argparse
from pathlib import Path

from moe_optim.commands.console.files import STDOUT
from moe_optim.commands.plan.gpus import GPUS, STEP
from moe_optim.integration.argv import add_changes, add_recipe

USAGE = "moe-optim plan [RECIPE] [options] [-- MEGATRON ARGS]"
_PHYSICAL = 0.001, 1_000_000
"""Least and largest memory and bandwidth, in any of their units."""
_COLUMNS = {  # -> meaning, for --help
    "experts": "weights, gradients and optimizer of a rank's experts: parameters of bf16 or two "
    "quantized directions with scales, the gradient buffer, masters and moments",
    "model": "the same of the whole model, of the fullest pipeline stage; without activations",
    "vs bf16, vs stock": "experts minus those of stock Megatron in bf16, or in the same format",
    "fits": "whether the model fits a GPU, and what is left for activations",
    "all-gather": "bytes of a parameter all-gather on each rank, including its own shard",
    "of bf16": "fraction of the bytes that stock bf16 gathers",
    "at GB/s": "time of the all-gather at that bandwidth, without overlap",
    "step": "estimated time of optimizer.step() without all-gather; stock bf16 was not measured",
}
_DETAILS = {  # further ones of --details
    "weights": "data and scales of every stored direction, and copies that compute makes",
    "grads": "the gradient buffer (main_grad)",
    "optimizer": "main params of 4 bytes, exp_avg and exp_avg_sq, or Muon's momentum; with "
    "--use-precision-aware-optimizer, main params of stock bf16 use 2 bytes",
    "copies": "fp32 copies that a step makes of bf16 gradients",
    "padding": "part of the buckets without weights",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_recipe(parser, "quickstart", nargs="?")
    parser.epilog = _legend()
    text = (
        "numbers of GPUs to compare (default: the recipe's ranks, and the minimum for the model "
        f"times powers of {STEP}, up to the batch size)"
    )
    add("--gpus", type=_count, nargs="+", metavar="N", help=text)
    text = (
        "GPU model, which sets the three options below: memory as cards report it; by its data "
        "sheet memory bandwidth, and the all-gather's link (NVLink, or one network port per GPU)"
    )
    add("--gpu", choices=GPUS, help=text)
    text = "memory of a GPU, in place of --gpu's: show whether the model fits, and what is left"
    add("--gpu-memory", type=_physical, metavar="GIB", help=text)
    text = (
        "bus bandwidth of an all-gather over expert data parallel ranks, as in nccl-tests, in "
        "place of --gpu's: show the time of the parameter all-gather, without overlap"
    )
    add("--bandwidth", type=_physical, metavar="GB/S", help=text)
    text = (
        "memory bandwidth of a GPU by its data sheet, in place of --gpu's: show the estimated "
        "time of optimizer.step()"
    )
    add("--memory-bandwidth", type=_physical, metavar="TB/S", help=text)
    add("--details", action="store_true", help="show all formats and columns")
    add_changes(parser, "moe_optim.expert_layout=indexed")
    text = "write the rows and their components to FILE, or print them as JSON"
    add("--json", type=Path, nargs="?", const=STDOUT, metavar="FILE", help=text)


def _legend() -> str:
    lines = [f"  {name}: {meaning}" for name, meaning in _COLUMNS.items()]
    further = [f"  {name}: {meaning}" for name, meaning in _DETAILS.items()]
    return "\n".join(["Columns:", *lines, "\nColumns of --details:", *further])


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers of GPUs, got {text!r}. Write RECIPE before the options."
        ) from None


def _physical(text: str) -> float:
    """Parse a memory or a bandwidth; an argparse ``type``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    least, most = _PHYSICAL
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(
            f"expected a number from {least:g} to {most:,}, got '{text}'"
        )
    return number


def run(args: argparse.Namespace) -> int:
    """Plan, write the requested files, and print the tables or JSON."""
    from moe_optim.commands.plan.report import plan

    return plan(args)
