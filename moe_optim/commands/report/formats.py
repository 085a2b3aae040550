"""One recipe in several formats: a run each, and the comparison of them."""

import argparse
from pathlib import Path

from moe_optim.commands.report.comparison import compare
from moe_optim.commands.train.run import train
from moe_optim.config.recipes import load_recipe
from moe_optim.errors import ConfigError
from moe_optim.screen import results_console


def train_formats(args: argparse.Namespace) -> int:
    """Train a run a format in folders of their names, then compare them beside these.

    All formats are checked against the recipe before the first run; a run that fails ends it.

    Args:
        args: of ``moe-optim train``, with ``formats`` set.

    Returns:
        The exit code: 0 done, else that of the run that failed.

    Raises:
        ConfigError: a format twice, one of them set by ``--set``, or one that the recipe refuses.
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
    runs = [_of_format(args, format, out / format) for format in formats]
    for run in runs:
        load_recipe(run.recipe, run.set)
    for run in runs:
        if code := train(run):
            left = " ".join(formats[runs.index(run) :])
            results_console().print(f"not compared: {left} did not finish")
            return code
    return compare([run.out for run in runs], out / "compare")


def _of_format(args: argparse.Namespace, format: str, out: Path) -> argparse.Namespace:
    changed = {"out": out, "set": [*args.set, f"moe_optim.format={format}"]}
    return argparse.Namespace(**(vars(args) | changed))
