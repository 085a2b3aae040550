"""``python -m benchmarks requantize``: options, tables and JSON."""

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby, product
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from benchmarks import tensorwise
from benchmarks.cases import SHAPE_SETS, TENSORWISE, Case, OneScaleCase
from benchmarks.requantize import Row, measure
from benchmarks.row_report import begin_rows, copy_speed, fill_report, machine, table_of_rows
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.config import Format
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console

FORMATS = (*(name for name in get_args(Format) if name != "bf16"), TENSORWISE)
COLUMNS = {
    "format": "format",
    "work": "work",
    "ms": "ms",
    "floor_ms": "floor",
    "fraction_of_floor": "of it",
    "te_ms": "TE ms",
    "host_us": "host us",
}
"""Table columns: key of a row -> heading. The JSON contains all keys."""


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks requantize``."""
    parser = kinds.add_parser(
        "requantize",
        help="time of requantization compared with a plain copy",
        description="Requantize experts in place, from fp32 masters and from gathered bf16, and "
        "derive the buffers that are not gathered; tensorwise is FP8 with per-tensor scaling. "
        "Every time is compared with its lower bound: the bytes to be moved at the speed of a "
        "copy.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    add("--format", choices=FORMATS, **several, help=f"of {', '.join(FORMATS)}; default: all")
    sets = f"of {', '.join(SHAPE_SETS)}; default: w1 on a GPU, small on a CPU"
    add("--shape-set", choices=SHAPE_SETS, **several, help=sets)
    shard = "owned share of every weight, in whole blocks; default: 1/1"
    add("--shard", type=_shard, nargs="+", default=[1], metavar="1/N", help=shard)
    against = "te: also time Transformer Engine's cast, after comparing bytes"
    add("--against", choices=["te"], metavar="NAME", help=against)
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE, row by row")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print tables, and write the results if requested."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.format = args.format or list(FORMATS)
    args.shape_set = args.shape_set or ["w1" if device == "cuda" else "small"]
    require_writable(args.json)
    if args.against:
        _check_against(device)
    report = begin_rows(_command(args), device)
    fill_report(report, _rows(args, device, copy_speed(report)), args.json, _progress)
    console = results_console()
    for table in _tables(report):
        print_table(console, table)
    return 0


def _shard(text: str) -> int:
    """Return N of ``1/N``."""
    match = re.fullmatch(r"1/([1-9][0-9]*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected 1/N with N at least 1, got '{text}'")
    return int(match[1])


def _check_against(device: str) -> None:
    from moe_optim.weights.te.recipe import import_error

    if device == "cpu":
        raise ConfigError(
            "--against te: expected a CUDA GPU, got none: Transformer Engine casts on GPUs alone. "
            "Leave --against out."
        )
    if error := import_error():
        raise ConfigError(
            f"--against te: expected Transformer Engine, but importing it raised {error}. "
            "pip install --no-build-isolation 'moe_optim[te]', or leave --against out."
        )


def _rows(args: argparse.Namespace, device: str, speed: float) -> Iterator[Row]:
    from benchmarks.te import cast
    from moe_optim.formats import get_format

    connection: AbstractContextManager[Any] = nullcontext()
    if args.against:
        connection = cast.group_of_one()
    with connection as group:
        for shape_set, shard, name in product(args.shape_set, args.shard, args.format):
            place: dict[str, Any] = {"shape_set": shape_set, "shard": shard, "device": device}
            if name == TENSORWISE:
                yield from tensorwise.measure(OneScaleCase(**place), speed, group)
            else:
                yield from measure(Case(format=get_format(name), **place), speed, group)


def _command(args: argparse.Namespace) -> str:
    """Return the equivalent command line with all defaults explicit."""
    shards = [f"1/{shard}" for shard in args.shard]
    words = ["python", "-m", "benchmarks", args.what, "--format", *args.format]
    words += ["--shape-set", *args.shape_set, "--shard", *shards]
    words += ["--against", args.against] if args.against else []
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _progress(row: Row) -> str:
    what = ", ".join(str(row[name]) for name in ("format", "work", "shape_set", "shard"))
    te = "" if row["te_ms"] is None else f", Transformer Engine {row['te_ms']} ms"
    return (
        f"{what}: {row['ms']} ms, {row['fraction_of_floor']} of the floor, host "
        f"{row['host_us']} us{te}"
    )


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each shape set and shard, within 80 columns."""
    for key, rows in groupby(report["rows"], lambda row: (row["shape_set"], row["shard"])):
        title = f"{key[0]}, shards of {key[1]}; {machine(report)}"
        yield table_of_rows(title, COLUMNS, rows, texts=("format", "work"))
