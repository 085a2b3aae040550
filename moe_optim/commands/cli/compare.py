"""Compare run folders.

Prints a table, and writes one HTML page, its plots as PNGs, and the numbers as JSON.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="output folder")


def run(args: argparse.Namespace) -> int:
    """Compare, then print the table and the path of the page."""
    from moe_optim.commands.report.comparison import compare

    return compare(args.runs, args.out)
