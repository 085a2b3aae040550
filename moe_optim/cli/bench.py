"""``moe-optim bench requantize``: time of one requantization beside the speed of a copy."""

import argparse
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from moe_optim.kernels.member_table import MemberTable

Shape = tuple[int, int, int]
W1: tuple[Shape, ...] = ((16, 1536, 2048), (16, 2048, 768)) * 8  # 0.604e9 parameters
SMALL: tuple[Shape, ...] = ((4, 256, 128), (4, 128, 256)) * 2
SHAPE_SETS = {"w1": W1, "small": SMALL}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
REPEATS = 15


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``bench`` command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine what the documents quote",
        description="Requantize MXFP8 experts, in place, from fp32 masters and from gathered bf16.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("what", choices=["requantize"], metavar="WHAT", help="what to measure: requantize")
    add("--shape-set", choices=SHAPE_SETS, help="default: w1 on a GPU, small on a CPU")
    add("--shard", type=int, default=1, metavar="N", help="1/N of the rows of every expert")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write the figures if asked to."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape_set = args.shape_set or ("w1" if device == "cuda" else "small")
    shapes = [(e, max(32, r // args.shard // 32 * 32), c) for e, r, c in SHAPE_SETS[shape_set]]
    speed = _copy_bytes_per_ms(device)
    rows = [
        {"shape_set": shape_set, "shard": f"1/{args.shard}"} | _measure(shapes, zero, speed, device)
        for zero in (False, True)
    ]
    report = {
        "command": shlex.join(["moe-optim", *sys.argv[1:]]),
        "commit": _commit(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "copy_tb_per_s": round(speed / 1e9, 3),
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    _print(report)
    return 0


def _measure(shapes: list[Shape], zero: bool, speed: float, device: str) -> dict[str, Any]:
    """Time the whole table once laid out; ``zero`` reads bf16 and wipes it, else fp32 is kept."""
    import torch

    from moe_optim import ops
    from moe_optim.formats import MXFP8

    table, numel = _lay_out(shapes, torch.bfloat16 if zero else torch.float32, zero, device)
    source_bytes = 2 + 2 if zero else 4  # bf16 is read and overwritten with zeros
    floor = numel * (source_bytes + float(MXFP8.wire_bytes_per_element)) / speed
    ops.requantize(table)  # compiles
    resident = _reset_peak(device)
    measured = _milliseconds(lambda: ops.requantize(table), device)
    temporary = torch.cuda.max_memory_allocated() - resident if device == "cuda" else None
    return {
        "format": MXFP8.name,
        "source": "bf16, zeroed" if zero else "fp32",
        "members": table.num_members,
        "ms": round(measured, 4),
        "floor_ms": round(floor, 4),
        "fraction_of_floor": round(floor / measured, 3),
        "te_ms": None,
        "host_us": round(_host_microseconds(table), 1),
        "temporary_bytes": temporary,
    }


def _lay_out(
    shapes: list[Shape], dtype: "torch.dtype", zero: bool, device: str
) -> tuple["MemberTable", int]:
    import torch

    from moe_optim.formats import MXFP8, QuantizedWeight
    from moe_optim.kernels.member_table import MemberTable, TableEntry

    numel = sum(math.prod(shape) for shape in shapes)
    memory = (torch.randn(numel, device=device) * 0.02).to(dtype)
    entries, start = [], 0
    for index, shape in enumerate(shapes):
        source = memory[start : start + math.prod(shape)].view(shape)
        target = QuantizedWeight.empty(MXFP8, shape, device=device)
        entries.append(TableEntry(parameter=f"weight {index}", source=source, target=target))
        start += source.numel()
    return MemberTable.build(entries, consumed=memory if zero else None), numel


def _milliseconds(function: Callable[[], object], device: str) -> float:
    """Return the median over repetitions, on the device's own clock where it has one."""
    if device == "cuda":
        return _device_milliseconds(function)
    times = []
    for _ in range(REPEATS + 3):
        began = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[3:])


def _device_milliseconds(function: Callable[[], object]) -> float:
    """Queue all repetitions before waiting, so that no launch is seen from the host's side."""
    import torch

    events: list[tuple[Any, Any]] = []
    for _ in range(REPEATS + 3):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events[3:]))


def _host_microseconds(table: "MemberTable") -> float:
    import torch

    from moe_optim import ops

    times = []
    for _ in range(50):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        ops.requantize(table)
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def _copy_bytes_per_ms(device: str) -> float:
    """Return bytes read and written a millisecond by a plain copy."""
    import torch

    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _milliseconds(lambda: target.copy_(source), device)


def _reset_peak(device: str) -> int:
    """Start counting the peak anew, and return what is allocated now, in bytes."""
    import torch

    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def _print(report: dict[str, Any]) -> None:
    columns = {
        "format": "format",
        "source": "source",
        "shard": "shard",
        "ms": "ms",
        "floor_ms": "floor ms",
        "fraction_of_floor": "of floor",
        "host_us": "host us",
    }
    table = Table(title=f"{report['device']}, copy {report['copy_tb_per_s']} TB/s")
    for header in columns.values():
        table.add_column(header)
    for row in report["rows"]:
        table.add_row(*(str(row[name]) for name in columns))
    Console().print(table)
