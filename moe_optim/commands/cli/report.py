"""Write a report of a run folder.

The report is one self-contained HTML page, with its plots also as PNGs. The run may still be in
progress.
"""

import argparse
from pathlib import Path

HELP = "write a report of a run: losses, expert health, time, configuration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="output folder (default: RUN/report)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from moe_optim.commands.report.run_report import report

    return report(args.run, args.out)
