"""``moe-optim compare``: several runs on one page."""

import argparse
from pathlib import Path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``compare`` command."""
    parser = subparsers.add_parser(
        "compare",
        help="lay runs over each other: losses, speed, bytes, memory",
        description="Read run folders, print a table of them, and write one HTML page, its "
        "pictures as PNGs, and the figures as JSON.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write to")


def run(args: argparse.Namespace) -> int:
    """Compare, print the table and where the page is."""
    from moe_optim.commands.report.comparison import compare

    return compare(args.runs, args.out)
