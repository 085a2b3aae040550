"""Read a run folder and write a report of it.

The report is one HTML page that needs nothing else, with its pictures as PNGs beside it. The run
may still be going on.
"""

import argparse
from pathlib import Path

HELP = "make a page of a run: losses, health of experts, time, what it was"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: RUN/report)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    from moe_optim.commands.report.run_report import report

    return report(args.run, args.out)
