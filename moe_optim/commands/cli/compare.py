"""Read run folders and compare them.

Prints a table, and writes one HTML page, its pictures as PNGs, and the figures as JSON.
"""

import argparse
from pathlib import Path

HELP = "lay runs over each other: losses, speed, bytes, memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write to")


def run(args: argparse.Namespace) -> int:
    """Compare, print the table and where the page is."""
    from moe_optim.commands.report.comparison import compare

    return compare(args.runs, args.out)
