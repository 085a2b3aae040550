"""``python -m benchmarks gather``: time and bytes of the parameter all-gather, by format and wire.

Every rank lays out the experts of a shape set like Megatron, one bucket per layer, with masters
sharded as by a distributed optimizer, and runs the work after a step without overlap.
"""

import argparse
import json
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from benchmarks.cases import SHAPE_SETS, ShapeSet
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.config import Format
from moe_optim.errors import ConfigError
from moe_optim.formats import round_up
from moe_optim.screen import print_table, results_console

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from moe_optim.buckets.gather import Wire
    from moe_optim.buckets.layout import Slot
    from moe_optim.buckets.managed_bucket import ManagedBucket
    from moe_optim.formats import BlockScaledFormat

FORMATS: tuple[Format, ...] = get_args(Format)
COLUMNS = {
    "format": "format",
    "wire": "wire",
    "bytes_per_parameter": "B/param",
    "fill_ms": "fill",
    "gather_ms": "gather",
    "land_ms": "land",
    "total_ms": "total ms",
    "ratio_to_bf16": "of bf16",
}
_REPEATS, _WARM_UP = 12, 3

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Phases of a gather as functions, which are timed one by one."""

    restore: Callable[[], object]
    """Untimed setup before each repetition."""
    fill: Callable[[], object]
    gather: Callable[[], object]
    land: Callable[[], object]
    wire_bytes: int


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks gather``."""
    parser = subparsers.add_parser(
        "gather",
        help="time and bytes of the parameter all-gather on several ranks",
        description="Quantize, gather and finish the experts of a shape set on the ranks of this "
        "machine, over NCCL on GPUs or gloo on a CPU, and compare with bf16 weights.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    add("--format", choices=FORMATS, **several, help=f"of {', '.join(FORMATS)}; default: all")
    sets = f"of {', '.join(SHAPE_SETS)}; default: w1 on GPUs, small on a CPU"
    add("--shape-set", choices=SHAPE_SETS, metavar="NAME", help=sets)
    add("--ranks", type=int, metavar="N", help="processes; default: one per GPU, or 2 on a CPU")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure on all ranks, print rank 0's table, and write its results if requested."""
    import torch
    from torch.multiprocessing.spawn import spawn

    from benchmarks.provenance import begin_report

    gpus = torch.cuda.device_count()
    args.format = args.format or list(FORMATS)
    args.ranks = (gpus or 2) if args.ranks is None else args.ranks
    args.shape_set = args.shape_set or ("w1" if gpus else "small")
    if args.ranks < 2 or (gpus and args.ranks > gpus):
        most = f" to {gpus}" if gpus else " or more"
        raise ConfigError(f"--ranks: expected 2{most}, got {args.ranks}. A gather needs company.")
    require_writable(args.json)
    with TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        arguments = (args.ranks, args.format, args.shape_set, str(rows))
        spawn(_rank, arguments, nprocs=args.ranks)
        report = {
            **begin_report(_command(args), on_gpu=bool(gpus), ranks=args.ranks),
            "rows": json.loads(rows.read_text()),
        }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print_table(results_console(), _table(report, args))
    return 0


def _command(args: argparse.Namespace) -> str:
    words = ["python", "-m", "benchmarks", "gather", "--format", *args.format]
    words += ["--shape-set", args.shape_set, "--ranks", str(args.ranks)]
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _table(report: dict[str, Any], args: argparse.Namespace) -> Table:
    title = f"{args.shape_set}, {args.ranks} ranks, {report['device']}; ms, medians of rank 0"
    table = Table(title=title, title_justify="left")
    for name, header in COLUMNS.items():
        is_text = name in ("format", "wire")
        table.add_column(header, justify="left" if is_text else "right", no_wrap=is_text)
    for row in report["rows"]:
        table.add_row(*(str(row[name]) for name in COLUMNS))
    return table


def _rank(rank: int, size: int, formats: Sequence[str], shape_set: str, out: str) -> None:
    """Measure on one rank; rank 0 writes its results."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
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
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )
    world = dist.group.WORLD
    assert world is not None, "init_process_group made no group"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    rows = list(_measure_all(formats, SHAPE_SETS[shape_set], world, device))
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure_all(
    formats: Sequence[str], shapes: ShapeSet, group: "ProcessGroup", device: "torch.device"
) -> Iterator[Row]:
    """Yield a row for bf16 weights, then two per format, one per gather dtype."""
    from benchmarks.timing import release
    from moe_optim.formats import get_format

    numel = shapes.layers * sum(e * r * c for e, r, c in shapes.weights)
    cases: list[tuple[str, str, Callable[[], Phases]]] = [
        ("bf16", "bf16", partial(_bf16_weights, shapes, group, device))
    ]
    for name in formats:
        for wire in ("bf16", "quantized") if name != "bf16" else ():
            format = get_format(name)
            cases.append(
                (name, wire, partial(_quantized_weights, format, wire, shapes, group, device))
            )
    baseline = None
    for name, wire, make in cases:
        phases = make()
        fill, gather, land = _median_ms(phases, device)
        wire_bytes = phases.wire_bytes
        del phases
        release(device.type)
        total = fill + gather + land
        baseline = baseline or total
        yield {
            "format": name,
            "wire": wire,
            "ranks": group.size(),
            "parameters": numel,
            "wire_bytes": wire_bytes,
            "bytes_per_parameter": round(wire_bytes / numel, 4),
            "fill_ms": round(fill, 4),
            "gather_ms": round(gather, 4),
            "land_ms": round(land, 4),
            "total_ms": round(total, 4),
            "ratio_to_bf16": round(total / baseline, 3),
        }


def _median_ms(phases: Phases, device: "torch.device") -> list[float]:
    """Return the medians of the three phases; all ranks start each repetition together."""
    import torch.distributed as dist

    from benchmarks.timing import Mark, wait

    steps = (phases.fill, phases.gather, phases.land)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_WARM_UP + _REPEATS):
        phases.restore()
        dist.barrier()
        marks = [Mark(device.type)]
        for step in steps:
            step()
            marks.append(Mark(device.type))
        wait(device.type)
        for own, before, after in zip(times, marks, marks[1:], strict=False):
            own.append(after.ms_since(before))
    return [statistics.median(own[_WARM_UP:]) for own in times]


def _slots(shapes: ShapeSet, layer: int) -> "tuple[Slot, ...]":
    from moe_optim.buckets.layout import side_by_side

    return side_by_side(shapes.weights, f"layer {layer}, weight ")


def _bf16_weights(shapes: ShapeSet, group: "ProcessGroup", device: "torch.device") -> Phases:
    """Megatron's gather of bf16 weights: copy the shard of the masters, gather in place."""
    import torch
    import torch.distributed as dist

    size, rank = group.size(), group.rank()
    masters, shards, buffers = [], [], []
    for layer in range(shapes.layers):
        end = _slots(shapes, layer)[-1].end
        numel = round_up(end, lcm(size, 128))
        buffer = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        shard = buffer.narrow(0, rank * (numel // size), numel // size)
        masters.append(torch.randn(numel // size, dtype=torch.float32, device=device))
        shards.append(shard)
        buffers.append(buffer)

    def gather() -> None:
        for buffer, shard in zip(buffers, shards, strict=True):
            dist.all_gather_into_tensor(buffer, shard, group=group)

    return Phases(
        restore=lambda: None,
        fill=lambda: torch._foreach_copy_(shards, masters),
        gather=gather,
        land=lambda: None,
        wire_bytes=sum(buffer.nbytes for buffer in buffers),
    )


def _quantized_weights(
    format: "BlockScaledFormat",
    wire: "Wire",
    shapes: ShapeSet,
    group: "ProcessGroup",
    device: "torch.device",
) -> Phases:
    """Gather by a bucket group, one bucket per layer."""
    from moe_optim.buckets.gather import fill_slices, start_gather
    from moe_optim.buckets.states import Event

    buckets = [
        _bucket(format, wire, shapes, layer, group, device) for layer in range(shapes.layers)
    ]

    def restore() -> None:
        for bucket in buckets:
            bucket.state.record(Event.SETTLE)

    def fill() -> None:
        for bucket in buckets:
            bucket.open_gather()
        fill_slices([bucket.gather for bucket in buckets], group)

    def gather_all() -> None:
        for bucket in buckets:
            start_gather(bucket.gather.sliced, bucket.reduced, group, asynchronous=False)

    def land() -> None:
        for bucket in buckets:
            bucket.finish()

    buffers = [buffer for bucket in buckets for buffer in bucket.gather.sliced]
    reduced = [values for bucket in buckets for values in bucket.reduced]
    return Phases(
        restore=restore,
        fill=fill,
        gather=gather_all,
        land=land,
        wire_bytes=sum(buffer.nbytes for buffer in buffers)
        + sum(values.nbytes for values in reduced),
    )


def _bucket(
    format: "BlockScaledFormat",
    wire: "Wire",
    shapes: ShapeSet,
    layer: int,
    group: "ProcessGroup",
    device: "torch.device",
) -> "ManagedBucket":
    """Return the bucket of one layer, whose owner has this rank's masters."""
    import torch

    from moe_optim.buckets.gather import OwnedMaster
    from moe_optim.buckets.layout import aligned_end
    from moe_optim.buckets.managed_bucket import ManagedBucket
    from moe_optim.weights.grouped_weight import GroupedWeight
    from moe_optim.weights.storage import PortableStorage

    size, rank = group.size(), group.rank()
    slots = _slots(shapes, layer)
    numel = aligned_end(format, slots, dp_size=size, divisor=lcm(size, 128)).numel
    params = [
        torch.nn.Parameter(
            GroupedWeight(PortableStorage(format, slot.shape, name=slot.name, device=device))
        )
        for slot in slots
    ]
    bucket = ManagedBucket(
        f"bucket {layer}",
        params,
        [slot.start for slot in slots],
        torch.zeros(numel, dtype=torch.bfloat16, device=device if wire == "bf16" else "meta"),
        dp_size=size,
        wire=wire,
    )
    masters = []
    for param, slot in zip(params, slots, strict=True):
        owned = slot.owned(rank, numel // size)
        if owned:
            master = torch.randn(len(owned), dtype=torch.float32, device=device)
            masters.append(OwnedMaster(param=param, start=owned.start, master=master))
    bucket.owner = SimpleNamespace(
        masters_of=lambda _: masters, book=SimpleNamespace(check_bucket=lambda _: 0)
    )
    return bucket
