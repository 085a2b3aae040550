"""``python -m benchmarks experts``: options, tables and JSON."""

import argparse
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.row_report import (
    begin_rows,
    choose_device,
    copy_speed,
    fill_report,
    machine,
    table_of_rows,
)
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

if TYPE_CHECKING:
    from benchmarks.experts import Row

BITS = ("8", "e4m3")
EXPERTS = {"cuda": [8, 16, 32, 64, 128], "cpu": [2, 4]}
SHAPES = {"cuda": [1536, 2048], "cpu": [64, 96]}
COLUMNS = {
    "placement": "experts lie",
    "way": "way",
    "forward_ms": "forward",
    "backward_ms": "backward",
    "step_ms": "step",
    "forward_of_contiguous": "fwd of one",
    "backward_of_contiguous": "bwd of one",
    "forward_of_best_other": "fwd of best",
    "backward_of_best_other": "bwd of best",
}
"""Table columns: key of a row -> heading. The JSON contains all keys."""


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks experts``."""
    parser = kinds.add_parser(
        "experts",
        help="fake quantization of experts, scattered in memory or in one tensor",
        description="Fake-quantize bf16 experts with one amax each, forward and backward, and step "
        "an optimizer over them: with our kernels, with a loop over experts in plain torch, with "
        "stacking, and with NVIDIA ModelOpt's module if installed. Times in ms; 'of one': relative "
        "to experts in one tensor; 'of best': ours relative to the fastest other.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--experts", type=int, nargs="+", metavar="N", help="default: 8 to 128; 2 and 4 on a CPU")
    shape = "rows and columns of an expert; default: 1536 2048; 64 96 on a CPU"
    add("--shape", type=int, nargs=2, metavar=("R", "C"), help=shape)
    add("--bits", choices=BITS, nargs="+", default=list(BITS), metavar="NAME", help="8, e4m3")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE, row by row")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print tables, and write the results if requested.

    Raises:
        ConfigError: sizes are invalid, no GPU is present, or the file is not writable.
    """
    args.device = choose_device(args.device)
    args.experts = args.experts or EXPERTS[args.device]
    args.shape = args.shape or SHAPES[args.device]
    if min(*args.experts, *args.shape) < 1:
        raise ConfigError(
            f"--experts, --shape: expected numbers above 0, got {min(*args.experts, *args.shape)}."
        )
    require_writable(args.json)
    from benchmarks.experts import import_modelopt

    report = begin_rows(_command(args), args.device)
    report["versions"]["modelopt"] = import_modelopt()[1]
    progress = Console(stderr=True, markup=False, highlight=False)
    progress.print(f"ModelOpt: {report['versions']['modelopt']}", soft_wrap=True)
    fill_report(report, _rows(args, copy_speed(report)), args.json, _progress)
    console = results_console()
    for table in _tables(report):
        print_table(console, table)
    return 0


def _rows(args: argparse.Namespace, speed: float) -> "Iterator[Row]":
    from benchmarks.experts import ExpertsCase, measure

    rows, cols = args.shape
    for bits in args.bits:
        for experts in args.experts:
            case = ExpertsCase(
                experts=experts,
                rows=rows,
                cols=cols,
                bits="e4m3" if bits == "e4m3" else int(bits),
                device=args.device,
            )
            yield from measure(case, speed)


def _command(args: argparse.Namespace) -> str:
    """Return the equivalent command line with all defaults explicit."""
    words = ["python", "-m", "benchmarks", "experts", "--experts", *map(str, args.experts)]
    words += ["--shape", *map(str, args.shape), "--bits", *args.bits, "--device", args.device]
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _progress(row: "Row") -> str:
    what = f"{row['bits']}, {row['experts']} experts, {row['placement']}, {row['way']}"
    return (
        f"{what}: forward {row['forward_ms']} ms, backward {row['backward_ms']} ms, host "
        f"{row['forward_host_us']} and {row['backward_host_us']} us"
    )


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    by_case = groupby(report["rows"], lambda row: (row["bits"], row["experts"], row["shape"]))
    for (bits, experts, shape), rows in by_case:
        grid = bits if bits == "e4m3" else f"{bits} bits"
        title = f"{grid}, {experts} experts of {shape}; {machine(report)}"
        yield table_of_rows(title, COLUMNS, rows, texts=("placement", "way"))
