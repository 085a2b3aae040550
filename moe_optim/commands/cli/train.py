"""Train an MoE GPT with Megatron and moe_optim on this machine.

Arguments after `--` are passed to Megatron unchanged and override the recipe's.
"""

import argparse
from pathlib import Path
from typing import get_args

from moe_optim.config import Format
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError
from moe_optim.integration.argv import add_changes, add_recipe
from moe_optim.screen import results_console

USAGE = "moe-optim train RECIPE [options] [-- MEGATRON ARGS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_recipe(parser, "quickstart")
    add("--out", type=Path, metavar="DIR", help="run folder (default: runs/<recipe name>)")
    add_changes(parser, "moe_optim.format=bf16")
    text = (
        "train one run per format, in subfolders of --out, and compare them: "
        f"{', '.join(get_args(Format))}"
    )
    add("--formats", nargs="+", default=[], choices=get_args(Format), metavar="FORMAT", help=text)
    text = (
        "files or folders to train on as bytes (default: Python's standard library; for a resumed "
        "run, its own)"
    )
    add("--text", action="extend", nargs="+", default=[], type=Path, metavar="PATH", help=text)
    add("--quiet", action="store_true", help="print errors and results, not the log of Megatron")
    add("--resume", action="store_true", help="continue from the newest complete checkpoint")
    add("--ranks", type=int, metavar="N", help="number of processes (default: the recipe's)")
    add("--cpu", action="store_true", help="train on the CPU even if there are GPUs")
    text = (
        "train with Megatron's own optimizer and experts, for comparison: uses only the "
        "megatron_args of the recipe"
    )
    add("--stock", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit code: 0 success, 1 failure, 128 + n stopped by signal n."""
    if args.formats:
        return _train_formats(args)
    from moe_optim.commands.train.run import train

    return train(args)


def _train_formats(args: argparse.Namespace) -> int:
    """Train one run per format, in folders named by it, until one fails, and compare them."""
    formats = args.formats
    if len(set(formats)) < len(formats) or len(formats) < 2:
        raise ConfigError(
            f"--formats: expected two or more different ones, got {' '.join(formats)}. Name every "
            "format once; for one alone write --set moe_optim.format=NAME."
        )
    if any(assignment.startswith("moe_optim.format=") for assignment in args.set):
        raise ConfigError("--formats and --set moe_optim.format both set the format. Remove one.")
    if args.stock:
        raise ConfigError("--formats: expected no --stock beside it. Train that run separately.")
    out = args.out or Path("runs") / args.recipe.stem
    runs = []
    for format in formats:
        changed = {"out": out / format, "set": [*args.set, f"moe_optim.format={format}"]}
        runs.append(argparse.Namespace(**(vars(args) | changed)))
        load_recipe(args.recipe, runs[-1].set)
    from moe_optim.commands.report.comparison import compare
    from moe_optim.commands.train.run import train

    for number, run in enumerate(runs):
        if code := train(run):
            results_console().print(f"not compared: {' '.join(formats[number:])} did not finish")
            return code
    return compare([run.out for run in runs], out / "compare")
