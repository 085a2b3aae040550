"""Trains one recipe in several formats and compares the runs."""

import argparse
from pathlib import Path

from moe_optim.commands.report.comparison import compare
from moe_optim.commands.train.run import train
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError
from moe_optim.screen import results_console


def train_formats(args: argparse.Namespace) -> int:
    """Train one run per format, in folders named by format, then compare; return the exit code.

    All formats are checked against the recipe before the first run; the first failure ends the
    command.

    Args:
        args: arguments of ``moe-optim train``, with ``formats`` set.
    """
    formats = args.formats
    if len(set(formats)) < len(formats) or len(formats) < 2:
        raise ConfigError(
            f"--formats: expected two or more different ones, got {' '.join(formats)}. Name every "
            "format once; for one alone write --set moe_optim.format=NAME."
        )
    if any(assignment.startswith("moe_optim.format=") for assignment in args.set):
        raise ConfigError("--formats and --set moe_optim.format both say the format. Drop one.")
    if args.stock:
        raise ConfigError("--formats: expected the plug-in, got --stock. Train that run apart.")
    out = args.out or Path("runs") / args.recipe.stem
    runs = []
    for format in formats:
        changed = {"out": out / format, "set": [*args.set, f"moe_optim.format={format}"]}
        runs.append(argparse.Namespace(**(vars(args) | changed)))
        load_recipe(args.recipe, runs[-1].set)
    for number, run in enumerate(runs):
        if code := train(run):
            results_console().print(f"not compared: {' '.join(formats[number:])} did not finish")
            return code
    return compare([run.out for run in runs], out / "compare")
