"""Trains a small model for many iterations, with saves and evaluations, to find resource leaks.

    python -m tools.upstream.soak --out DIR --json FILE [--iterations N] [--cpu]

Runs ``moe-optim train``: FP8 blocks through Transformer Engine on GPUs, portable MXFP8 on CPUs.
Samples memory and open files of its processes once per second, and compares the second quarter of
the run with the last. Exit status: 1 if a metric grew by more than its limit, or the run failed.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import kernels
from moe_optim.commands.console.provenance import commit
from moe_optim.commands.report.reading import Run, read_run
from tools.upstream.convergence import FP8_BLOCKS, RECIPE

ALLOWED: Mapping[str, float] = {
    "iteration, ms": 1.10,
    "allocated on the GPU, bytes": 1.001,
    "resident, bytes": 1.02,
    "open files": 1.0,
    "threads": 1.0,
}
"""Metric -> maximum ratio of the medians of the last and the second quarter."""

Samples = dict[str, list[float]]


def command_of(folder: Path, iterations: int, *, cpu: bool) -> list[str]:
    """Return the training command, with 40 evaluations and 20 saves for any iterations."""
    side = () if cpu else FP8_BLOCKS.train
    command = ["moe-optim", "train", str(RECIPE), "--out", str(folder), *side]
    command += ["--cpu"] if cpu else ["--ranks", "1"]
    flags = ["--train-iters", str(iterations), "--eval-interval", str(iterations // 40)]
    flags += ["--save-interval", str(iterations // 20), *(() if cpu else FP8_BLOCKS.megatron)]
    return [*command, "--", *flags]


def train(command: Sequence[str], log: Path) -> Samples | None:
    """Train, and return samples of its processes, one per second; None if it failed."""
    samples: Samples = {"resident, bytes": [], "open files": [], "threads": []}
    argv = [sys.executable, "-m", "moe_optim.commands.cli.main", *command[1:]]
    with log.open("w") as file, subprocess.Popen(argv, stdout=file, stderr=file) as launcher:
        while launcher.poll() is None:
            time.sleep(1.0)
            for figure, value in look_at(launcher.pid).items():
                samples[figure].append(value)
    return samples if launcher.returncode == 0 else None


def look_at(launcher: int) -> dict[str, float]:
    """Return the maximum of each metric over the ranks, which are the largest processes."""
    found: list[tuple[int, int, int]] = []
    with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        for process in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.NoSuchProcess), process.oneshot():
                memory = process.memory_info().rss
                found.append((memory, process.num_fds(), process.num_threads()))
    most = max((memory for memory, *_ in found), default=0)
    ranks = [one for one in found if one[0] > most / 2]
    names = ("resident, bytes", "open files", "threads")
    return {name: float(max(of)) for name, of in zip(names, zip(*ranks, strict=True), strict=False)}


def quarters(values: Sequence[float]) -> tuple[float, float]:
    n = len(values)
    return median(values[n // 4 : n // 2]), median(values[3 * n // 4 :])


def logged(run: Run) -> Iterator[tuple[str, list[float]]]:
    tags = {"iteration, ms": ("iteration-time", 1e3)}
    tags["allocated on the GPU, bytes"] = ("mem-allocated-bytes", 1.0)
    for figure, (tag, unit) in tags.items():
        if points := run.points(tag):
            yield figure, [unit * point.value for point in points]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream.soak")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = command_of(args.out, args.iterations, cpu=args.cpu)
    sampled = train(command, args.out.with_suffix(".log"))
    if sampled is None:
        print(f"the run failed, see {args.out.with_suffix('.log')}")
        return 1
    run = read_run(args.out)
    rows = [
        {
            "figure": figure,
            "second_quarter": early,
            "last_quarter": late,
            "allowed": ALLOWED[figure],
        }
        for figure, values in [*logged(run), *sampled.items()]
        for early, late in [quarters(values)]
    ]
    grown = [
        row["figure"]
        for row in rows
        if row["last_quarter"] > row["allowed"] * row["second_quarter"]
    ]
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "tools.upstream.soak", *sys.argv[1:]]),
        "commit": commit(),
        **kernels(on_gpu="CPU" not in run.model["environment"]["device"]),
        "device": run.model["environment"]["device"],
        "versions": run.model["environment"]["versions"],
        "iterations": args.iterations,
        "saves": len(list((args.out / "checkpoints").glob("iter_*"))),
        "evaluations": len(run.events.validation),
        "rows": rows,
        "grown": grown,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("figure", "second quarter", "last quarter", "ratio", "at most")
    for row in rows:
        early, late = row["second_quarter"], row["last_quarter"]
        table.add_row(
            row["figure"],
            f"{early:,.1f}",
            f"{late:,.1f}",
            f"{late / early:.3f}",
            f"{row['allowed']:g}",
        )
    Console().print(table)
    print(f"grown: {', '.join(grown) or 'nothing'}")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
