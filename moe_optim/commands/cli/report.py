"""Write a report of a run folder.

One self-contained HTML page answers whether quantization harmed the run; its plots are also written
as PNGs. The run may still be in progress.
"""

import argparse
from pathlib import Path

from moe_optim.commands.train.run_folder import find_events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = "run folder, or a folder of TensorBoard events"
    parser.add_argument("run", type=Path, metavar="RUN", help=text)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="output folder (default: RUN/report)"
    )
    text = (
        "judge the run up to this iteration, and show its last health sample (default: the last of "
        "all)"
    )
    parser.add_argument("--at", type=int, metavar="ITERATION", help=text)


def run(args: argparse.Namespace) -> int:
    """Write the page, and print the verdict and its path."""
    find_events(args.run)  # before the import of torch, which takes seconds
    from moe_optim.commands.report.run_report import report

    return report(args.run, args.out, args.at)
