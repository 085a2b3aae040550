"""Compare run folders.

Prints a table, and writes one HTML page, its plots as PNGs, and the numbers as JSON.
"""

import argparse
from pathlib import Path

from moe_optim.commands.train.run_folder import find_events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    text = "output folder (default: compare, beside the first RUN)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Compare, then print the table and the path of the page."""
    for path in args.runs:  # before the import of torch, which takes seconds
        find_events(path)
    from moe_optim.commands.report.comparison import compare

    return compare(args.runs, args.out or args.runs[0].resolve().parent / "compare")
