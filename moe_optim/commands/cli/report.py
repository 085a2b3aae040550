"""``moe-optim report``: a run folder as one page."""

import argparse
from pathlib import Path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``report`` command."""
    parser = subparsers.add_parser(
        "report",
        help="make a page of a run: losses, health of experts, time, what it was",
        description="Read a run folder and write one HTML page that needs nothing else, and its "
        "pictures as PNGs beside it. The run may still be going on.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: RUN/report)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    from moe_optim.commands.report.run_report import report

    return report(args.run, args.out)
