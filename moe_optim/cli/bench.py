"""``moe-optim bench``: what the documents quote, measured."""

import argparse

from moe_optim.bench import convert, experts_report, gather, requantize_report, step
from moe_optim.bench.export import command as export
from moe_optim.bench.offload import command as offload

KINDS = {
    "requantize": requantize_report,
    "gather": gather,
    "convert": convert,
    "step": step,
    "offload": offload,
    "export": export,
    "experts": experts_report,
}
"""What can be measured -> the module that adds its options and runs it."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``bench`` command."""
    bench = subparsers.add_parser(
        "bench", help="measure on this machine what the documents quote", allow_abbrev=False
    )
    kinds = bench.add_subparsers(dest="what", metavar="WHAT", required=True)
    for kind in KINDS.values():
        kind.add_parser(kinds)


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, and write the figures if asked to."""
    return int(KINDS[args.what].run(args))
