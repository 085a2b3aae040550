"""``python -m benchmarks muon``: options, tables and JSON."""

import argparse
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from benchmarks.muon.cases import (
    CASES,
    HOST_MATRICES,
    QWEN3,
    SMALL,
    SMALL_HOST_MATRICES,
    Iteration,
    Row,
)
from benchmarks.row_report import begin_rows, copy_speed, fill_report, machine, table_of_rows
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

if TYPE_CHECKING:
    from benchmarks.muon.floors import Machine

FORMATS = ("fp8_block", "bf16", "mxfp8", "mxfp8_2d", "nvfp4")
"""Formats of the weights, the first of which the host time is measured with."""
REPEATS = 7
_TIMES = {
    "ms": "ms",
    "host_ms": "host ms",
    "floor_ms": "floor",
    "of_floor": "of it",
    "of_stock": "of stock",
}
COLUMNS = {
    "apart": {"way": "way", **_TIMES, "tflop_per_s": "TFLOP/s", "distance": "from fp64"},
    "together": {"way": "way", **_TIMES, "tflop_per_s": "TFLOP/s", "distance": "from fp64"},
    "step": {"way": "way", "format": "format", "work": "work", **_TIMES},
    "host": {
        "matrices": "matrices",
        "way": "way",
        "host_ms": "host ms",
        "of_stock": "of stock",
        "launches": "launches",
        "chunks": "chunks",
    },
    "gather": {
        "data_parallel": "ranks",
        "way": "way",
        "format": "format",
        "bytes_per_parameter": "bytes per parameter",
    },
}
"""Case -> key of a row -> heading. The JSON contains all keys."""
TITLES = {
    "apart": "Newton-Schulz, gate and up apart",
    "together": "Newton-Schulz, gate and up together",
    "step": "step, gate and up apart",
    "host": "host time of a step",
    "gather": "gather",
}


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks muon``."""
    parser = kinds.add_parser(
        "muon",
        help="time of Muon's step of a layer of experts, compared with stock",
        description="Orthogonalize and step the experts of one layer of Qwen3-30B-A3B with "
        "emerging-optimizers, one matrix at a time, and with the plug-in. Times are compared with "
        "lower bounds: bytes at the speed of a copy, operations at that of a large product.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    cases = f"of {', '.join(CASES)}; default: all"
    add("--case", choices=CASES, **several, default=list(CASES), help=cases)
    formats = f"of {', '.join(FORMATS)}; default: all"
    add("--format", choices=FORMATS, **several, default=list(FORMATS), help=formats)
    iterations = "muon_iteration of the plug-in's steps (default auto)"
    add("--iteration", choices=get_args(Iteration), default="auto", help=iterations)
    add("--repeat", type=int, default=REPEATS, metavar="N", help=f"repetitions (default {REPEATS})")
    small = "small experts, as by default on a CPU"
    add("--small", action="store_true", help=small)
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE, row by row")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print tables, and write the results if requested.

    Raises:
        ConfigError: emerging-optimizers is missing, or a number or file is invalid.
    """
    import torch

    from benchmarks.muon.floors import Machine, product_operations_per_ms
    from benchmarks.timing import release

    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.small = args.small or device == "cpu"
    if args.repeat < 1:
        raise ConfigError(f"--repeat: expected 1 or more, got {args.repeat}.")
    _require_stock()
    require_writable(args.json)
    report = begin_rows(_command(args), device)
    operations = product_operations_per_ms(device)
    release(device)
    report["product_tflop_per_s"] = round(operations / 1e9, 3)
    on = Machine(
        device=device,
        repeats=args.repeat,
        bytes_per_ms=copy_speed(report),
        operations_per_ms=operations,
    )
    fill_report(report, map(asdict, _rows(args, on)), args.json, _progress)
    console = results_console()
    for table in _tables(report):
        print_table(console, table)
    return 0


def _require_stock() -> None:
    try:
        import emerging_optimizers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"benchmarks muon: expected emerging-optimizers, to compare with, but importing it "
            f"raised {error}. Run pip install 'moe_optim[muon]'."
        ) from error


def _rows(args: argparse.Namespace, on: "Machine") -> Iterator[Row]:
    from benchmarks.muon import gather, host, iteration, step
    from benchmarks.timing import release

    experts, sizes = (SMALL, SMALL_HOST_MATRICES) if args.small else (QWEN3, HOST_MATRICES)
    for case in args.case:
        if case in ("apart", "together"):
            yield from iteration.measure(case, experts, on)
        elif case == "step":
            with _group(on.device) as group:
                yield from step.measure(experts, args.format, args.iteration, on, group)
        elif case == "host":
            small = replace(SMALL, count=0)
            format = args.format[0]
            yield from host.measure(experts, small, sizes, format, args.iteration, on)
        else:
            yield from gather.measure(experts, args.format)
        release(on.device)


def _group(device: str) -> AbstractContextManager[Any]:
    """Return a context with a group over which Transformer Engine casts, if it is installed."""
    from benchmarks.te import cast
    from moe_optim.weights.te.recipe import import_error

    if device == "cpu" or import_error():
        return nullcontext()
    return cast.group_of_one()


def _command(args: argparse.Namespace) -> str:
    """Return the equivalent command line with all defaults explicit."""
    words = ["python", "-m", "benchmarks", args.what, "--case", *args.case]
    words += ["--format", *args.format, "--iteration", args.iteration]
    words += ["--repeat", str(args.repeat), *(["--small"] if args.small else [])]
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _progress(row: dict[str, Any]) -> str:
    names = ("case", "matrices", "way", "format", "work")
    what = ", ".join(str(row[name]) for name in names if row[name] is not None)
    figures = {"ms": "ms", "host_ms": "host ms", "of_floor": "of the floor", "of_stock": "of stock"}
    figures |= {"distance": "from fp64", "bytes_per_parameter": "bytes per parameter"}
    said = [f"{row[key]} {unit}" for key, unit in figures.items() if row[key] is not None]
    return f"{what}: {', '.join(said)}"


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each case."""
    for case, grouped in groupby(report["rows"], lambda row: row["case"]):
        rows = list(grouped)
        about = f"{rows[0]['matrices']} matrices, " if case != "host" else ""
        title = f"{TITLES[case]}; {about}{machine(report)}"
        title += f", product {report['product_tflop_per_s']} TFLOP/s"
        yield table_of_rows(title, COLUMNS[case], rows, texts=("way", "format", "work"))
