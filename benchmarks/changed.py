"""``python -m benchmarks changed``: shares of weights that steps at small learning rates change.

Takes steps of Adam, and compares the bytes of the weights before and after, in whole blocks of
several sizes. Moments begin as after many steps: of gradients drawn anew, exp_avg is normal with
deviation sqrt((1 - beta1) / (1 + beta1)) of the gradients'. The optimizer is the fused step in
plain torch.
"""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.provenance import begin_report
from benchmarks.row_report import fill_report, table_of_rows
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS, get_format
from moe_optim.screen import print_table, results_console

if TYPE_CHECKING:
    from torch import Tensor

# Imports of torch take seconds, and are local to functions.

NAMES = ("bf16", *FORMATS)
DEFAULT = ("bf16", "mxfp8_rows", "mxfp8_2d", "fp8_block", "nvfp4_rows", "mxfp4", "int4")
RATES = (1e-5, 1e-6, 5e-7)
BLOCKS = (4, 16, 128, 1024, 4096)
POSITION_BYTES = 4
NOISE, SAME = "noise", "the same"
"""Gradients: drawn anew for each step, or identical in all steps, where each moves by the rate."""
WARM = 1000
"""Steps before the first."""
BETAS, EPS, DECAY, DEVIATION, GRADIENT = (0.9, 0.98), 1e-8, 0.1, 0.02, 1e-3
COLUMNS = {
    "format": "format",
    "lr": "learning rate",
    "gradients": "gradients",
    "steps": "steps",
    "changed": "bytes changed",
    **{f"sent_{size}": f"sent by {size} B" for size in BLOCKS},
}
"""Table columns: key of a row -> heading. The JSON contains all keys."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedCase:
    """Experts of one linear, and the steps that change them."""

    shape: tuple[int, int, int]
    """Experts, rows and columns."""
    lr: float
    gradients: str
    steps: Sequence[int]
    """Numbers of steps after which weights are compared, ascending."""


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks changed``."""
    parser = kinds.add_parser(
        "changed",
        help="share of weights that steps at small learning rates change",
        description="Take steps of Adam on a CPU, with moments as after many steps. Count the "
        "bytes of weights that differ, and those of an update of whole blocks and positions.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    add("--format", choices=NAMES, default=DEFAULT, **several, help=", ".join(NAMES))
    add("--lr", type=float, nargs="+", default=RATES, metavar="LR", help="default: 1e-5 1e-6 5e-7")
    add("--steps", type=int, nargs="+", default=(1, 16), metavar="N", help="default: 1 16")
    shape = "experts, rows and columns (default 2 128 512)"
    add("--shape", type=int, nargs=3, default=(2, 128, 512), metavar=("E", "R", "C"), help=shape)
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE, row by row")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write the results if requested.

    Raises:
        ConfigError: a rate or number of steps is not above 0, or the file is not writable.
        LayoutError: a format does not support the shape.
    """
    if min(*args.lr, *args.steps, *args.shape) <= 0:
        raise ConfigError(
            "--lr, --steps, --shape: expected numbers above 0, got "
            f"{args.lr}, {args.steps} and {args.shape}. Give larger ones."
        )
    for name in set(args.format) - {"bf16"}:
        get_format(name).check_shape(args.shape, "--shape")
    require_writable(args.json)
    report = {**begin_report(_command(args), on_gpu=False), "rows": []}
    cases = [
        ChangedCase(shape=tuple(args.shape), lr=lr, gradients=kind, steps=sorted(args.steps))
        for kind in (NOISE, SAME)
        for lr in args.lr
    ]
    rows = (row for case in cases for row in measure(case, args.format))
    fill_report(report, rows, args.json, _progress)
    title = f"{' x '.join(map(str, args.shape))}; {report['device']}"
    spelt = map(_spelt, report["rows"])
    texts = ("format", "gradients")
    print_table(results_console(), table_of_rows(title, COLUMNS, spelt, texts=texts))
    return 0


def measure(case: ChangedCase, formats: Sequence[str]) -> Iterator[Row]:
    """Yield a row per number of steps and format."""
    stepping = _steps(case)
    warm = next(stepping)
    before = {name: _bytes(warm, name) for name in formats}
    for taken, master in enumerate(stepping, 1):
        if taken not in case.steps:
            continue
        for name, old in before.items():
            row = {"format": name, "lr": case.lr, "gradients": case.gradients, "steps": taken}
            yield row | _compare(old, _bytes(master, name))


def _steps(case: ChangedCase) -> "Iterator[Tensor]":
    """Yield the warm master [E, R, C], then again after each step."""
    import torch

    from moe_optim.formats.reference.adam import Hyper
    from moe_optim.kernels.adam_state import AdamState
    from moe_optim.kernels.step_table import StepTable

    generator = torch.Generator().manual_seed(0)
    master = torch.empty(case.shape).normal_(std=DEVIATION, generator=generator)
    gradient = torch.empty(master.numel()).normal_(std=GRADIENT, generator=generator)
    is_noise = case.gradients == NOISE
    exp_avg, exp_avg_sq = gradient.clone(), gradient.square()
    if is_noise:
        factor = ((1 - BETAS[0]) / (1 + BETAS[0])) ** 0.5
        exp_avg.normal_(std=GRADIENT * factor, generator=generator)
        exp_avg_sq.fill_(GRADIENT**2)
    state = AdamState(
        parameter="weight",
        master=master.view(-1),
        gradient=gradient,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
    )
    hyper = torch.empty(1, len(_hyper(Hyper, case, 1)))
    table = StepTable.build([state], hyper, torch.ones(1), backend="reference")
    yield master
    for taken in range(1, max(case.steps) + 1):
        hyper[0] = torch.tensor(_hyper(Hyper, case, WARM + taken))
        table.launch()
        yield master
        if is_noise:
            gradient.normal_(std=GRADIENT, generator=generator)


def _hyper(hyper: Any, case: ChangedCase, step: int) -> list[float]:
    row: list[float] = hyper(lr=case.lr, betas=BETAS, eps=EPS, weight_decay=DECAY, step=step).row()
    return row


def _bytes(master: "Tensor", format: str) -> "list[Tensor]":
    """Return the bytes of data and of scales, each flat."""
    import torch

    from moe_optim import ops

    if format == "bf16":
        return [master.bfloat16().view(torch.uint8).view(-1)]
    quantized = ops.quantize(master, format, backend="reference")
    buffers = [quantized.rowwise_data, quantized.rowwise_scale]
    buffers += [] if quantized.global_amax is None else [quantized.global_amax]
    return [one.contiguous().view(-1).view(torch.uint8) for one in buffers]


def _compare(old: "list[Tensor]", new: "list[Tensor]") -> Row:
    """Return shares of all bytes: changed, and sent as whole blocks with their positions."""
    import torch

    differs = [one != other for one, other in zip(old, new, strict=True)]
    total = sum(one.numel() for one in differs)
    row: Row = {"bytes": total, "changed": sum(int(one.sum()) for one in differs) / total}
    scales = sum(one.numel() for one in differs[1:])
    row["scales_changed"] = sum(int(one.sum()) for one in differs[1:]) / scales if scales else None
    for size in BLOCKS:
        blocks = torch.cat([_in_blocks(one, size) for one in differs])
        changed = int(blocks.sum())
        row[f"blocks_{size}"] = changed / len(blocks)
        row[f"sent_{size}"] = changed * (size + POSITION_BYTES) / total
    return row


def _in_blocks(differs: "Tensor", size: int) -> "Tensor":
    """Return whether each block differs; the last one may be shorter."""
    import torch

    padded = torch.nn.functional.pad(differs, (0, -len(differs) % size))
    return padded.view(-1, size).any(1)


def _command(args: argparse.Namespace) -> str:
    """Return the equivalent command line with all defaults explicit."""
    words = ["python", "-m", "benchmarks", args.what, "--format", *args.format]
    words += ["--lr", *(f"{one:g}" for one in args.lr), "--steps", *map(str, args.steps)]
    words += ["--shape", *map(str, args.shape)]
    words += ["--json", str(args.json)] if args.json else []
    return shlex.join(words)


def _progress(row: Row) -> str:
    return (
        f"{row['format']}, {row['lr']:g}, {row['gradients']}, {row['steps']}: {row['changed']:.3%}"
    )


def _spelt(row: Row) -> Row:
    shares = {key: f"{value:.2%}" for key, value in row.items() if key.startswith("sent_")}
    return row | shares | {"changed": f"{row['changed']:.3%}", "lr": f"{row['lr']:g}"}
