"""``python -m benchmarks export``: options, table and JSON."""

import argparse
import faulthandler
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cases import MODELS
from benchmarks.requantize_report import FORMATS
from benchmarks.row_report import begin_rows, machine, table_of_rows
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError
from moe_optim.screen import print_table, results_console
from moe_optim.spelling import spell_bytes

COLUMNS = {
    "format": "format",
    "way": "experts go",
    "tensors": "tensors",
    "received": "from other ranks",
    "loaded": "loaded",
    "ms": "ms",
    "host_ms": "host ms",
    "of_bf16": "of bf16",
    "tensors_per_linear": "tensors per linear",
    "transfers_per_linear": "transfers per linear",
    "other_scales": "other scales",
}
"""Table columns: key of a row -> heading. The JSON contains all keys."""
GUARD_S = 900
"""Seconds after which a rank is taken to hang."""


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks export``."""
    parser = kinds.add_parser(
        "export",
        help="time and bytes of exporting experts to an engine on every rank",
        description="Export the experts of a model, distributed over this machine's ranks, into "
        "an engine's memory on each: quantized; in bf16; and in bf16, requantized there with one "
        "launch per linear. The bf16 weights are prepared in advance. Uses NCCL on GPUs, gloo on a "
        "CPU.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    add("--format", choices=FORMATS, **several, help=f"of {', '.join(FORMATS)}; default: all")
    models = f"of {', '.join(MODELS)}; default: qwen3-30b-a3b (12 layers) on GPUs, small on a CPU"
    add("--model", choices=MODELS, metavar="NAME", help=models)
    add("--ranks", type=int, metavar="N", help="processes; default: one per GPU, or 2 on a CPU")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure on all ranks, print rank 0's table, and write its results if requested."""
    import torch
    from torch.multiprocessing.spawn import spawn

    gpus = torch.cuda.device_count()
    args.format = args.format or list(FORMATS)
    args.ranks = (gpus or 2) if args.ranks is None else args.ranks
    args.model = args.model or ("qwen3-30b-a3b" if gpus else "small")
    counts = {experts for experts, _, _ in MODELS[args.model].weights}
    if args.ranks < 1 or (gpus and args.ranks > gpus) or any(n % args.ranks for n in counts):
        most = f", {gpus} at most," if gpus else ""
        raise ConfigError(
            f"--ranks: expected a number{most} that the {max(counts)} experts of {args.model} can "
            f"be spread over, got {args.ranks}."
        )
    require_writable(args.json)
    report = begin_rows(_command(args), "cuda" if gpus else "cpu")
    with TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        spawn(_rank, (args.ranks, args.format, args.model, str(rows)), nprocs=args.ranks)
        report["rows"] = json.loads(rows.read_text())
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    title = f"{report['rows'][0]['model']}, {args.ranks} ranks; {machine(report)}; medians"
    spelt = map(_spelt, report["rows"])
    print_table(
        results_console(), table_of_rows(title, COLUMNS, spelt, texts=("format", "way", "tensors"))
    )
    return 0


def _command(args: argparse.Namespace) -> str:
    """Return the equivalent command line with all defaults explicit."""
    words = ["python", "-m", "benchmarks", args.what, "--format", *args.format]
    words += ["--model", args.model, "--ranks", str(args.ranks)]
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _spelt(row: dict[str, Any]) -> dict[str, Any]:
    share = row["other_scales"]
    return row | {
        "received": spell_bytes(row["received_bytes"]),
        "loaded": spell_bytes(row["loaded_bytes"]),
        "other_scales": None if share is None else f"{share:.2%}",
    }


def _rank(rank: int, size: int, formats: Sequence[str], model: str, out: str) -> None:
    """Measure on one rank; rank 0 writes its results. A rank that hangs shows where, and ends."""
    faulthandler.dump_traceback_later(GUARD_S, exit=True)
    import torch
    import torch.distributed as dist

    from benchmarks.export.measure import measure

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{out}.store", size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    rows: Iterable[Any] = [row for name in formats for row in measure(model, name, device)]
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
