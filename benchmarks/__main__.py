"""``python -m benchmarks``: runs one benchmark on this machine."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks import (
    changed,
    checkpoint,
    convert,
    copies,
    experts_report,
    gather,
    requantize_report,
    step,
)
from benchmarks.export import command as export
from benchmarks.muon import command as muon
from benchmarks.offload import command as offload
from moe_optim.commands.cli.main import run_command

KINDS = {
    "requantize": requantize_report,
    "gather": gather,
    "convert": convert,
    "checkpoint": checkpoint,
    "step": step,
    "offload": offload,
    "export": export,
    "changed": changed,
    "experts": experts_report,
    "copies": copies,
    "muon": muon,
}
"""Benchmark -> module that adds its options and runs it."""


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure on this machine what the documents quote.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for kind in KINDS.values():
        kind.add_parser(kinds)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print tables, and write the results if requested."""
    return int(KINDS[args.what].run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code; None for the process's ``argv``."""
    return run_command(build_parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
