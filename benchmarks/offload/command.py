"""``python -m benchmarks offload``: options, table and JSON."""

import argparse
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cases import SHAPE_SETS, Case
from benchmarks.offload.measure import Row, link_bytes_per_ms, measure
from benchmarks.requantize_report import FORMATS
from benchmarks.row_report import begin_rows, fill_report, machine, table_of_rows
from benchmarks.timing import release
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.screen import print_table, results_console
from moe_optim.spelling import spell_bytes

COLUMNS = {
    "format": "format",
    "offload_states": "offload_states",
    "host": "on the host",
    "device": "peak on the GPU",
    "ms": "step ms",
    "link_gb_per_s": "GB/s each way",
    "fraction_of_link": "of copies",
}
"""Table columns: key of a row -> heading. The JSON contains all keys."""


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks offload``."""
    parser = kinds.add_parser(
        "offload",
        help="memory and time of fused steps with states on the host",
        description="Perform fused steps of the same experts with a fraction of their states "
        "on the host, after verifying that all rows produce the same bytes. The traffic over the "
        "host link is compared with the speed of simultaneous copies in both directions.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    formats = f"of {', '.join(FORMATS)}; default: fp8_block"
    add("--format", choices=FORMATS, **several, default=["fp8_block"], help=formats)
    sets = f"of {', '.join(SHAPE_SETS)}; default: w1 on a GPU, small on a CPU"
    add("--shape-set", choices=SHAPE_SETS, metavar="NAME", help=sets)
    fractions = "fractions of states on the host, in order; default: 0 0.5 1"
    add(
        "--offload-states",
        type=_fraction,
        nargs="+",
        default=[0.0, 0.5, 1.0],
        metavar="PART",
        help=fractions,
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE, row by row")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print a table per shape set, and write the results if requested."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.shape_set = args.shape_set or ("w1" if device == "cuda" else "small")
    require_writable(args.json)
    report = begin_rows(_command(args), device)
    speed = link_bytes_per_ms(device)
    release(device)
    report["link_gb_per_s"] = round(speed / 1e6, 2)
    fill_report(report, _rows(args, device, speed), args.json, _progress)
    for table in _tables(report):
        print_table(results_console(), table)
    return 0


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got '{text}'")
    return fraction


def _rows(args: argparse.Namespace, device: str, speed: float) -> Iterator[Row]:
    from moe_optim.formats import get_format

    for name in args.format:
        case = Case(format=get_format(name), shape_set=args.shape_set, shard=1, device=device)
        yield from measure(case, args.offload_states, speed)


def _command(args: argparse.Namespace) -> str:
    """Return the equivalent command line with all defaults explicit."""
    words = ["python", "-m", "benchmarks", args.what, "--format", *args.format]
    words += ["--shape-set", args.shape_set]
    words += ["--offload-states", *map(str, args.offload_states)]
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _progress(row: Row) -> str:
    return (
        f"{row['format']}, {row['shape_set']}, offload_states {row['offload_states']}: "
        f"{row['ms']} ms, {row['link_gb_per_s']} GB/s each way"
    )


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    for shape_set, rows in groupby(report["rows"], lambda row: row["shape_set"]):
        title = f"{shape_set}; {machine(report)}, copies both ways {report['link_gb_per_s']} GB/s"
        yield table_of_rows(title, COLUMNS, map(_spelt, rows), texts=("format",))


def _spelt(row: Row) -> Row:
    device = row["device_bytes"]
    return row | {
        "host": spell_bytes(row["host_bytes"]),
        "device": None if device is None else spell_bytes(device),
    }
