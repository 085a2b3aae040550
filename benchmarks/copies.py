"""``python -m benchmarks copies``: quantized copies of bf16 experts, and steps that read them.

Times the copy of all experts of a linear against its floor: reading and writing bf16 once, and
reading once more for the amax of NVFP4. Grids have calibrated amaxes. Also times what portable
experts do before a GEMM: dequantizing stored weights, beside reading them and writing bf16. With
Transformer Engine, also times the microbatches of one step through its ``GroupedLinear``, forward
and backward, with and without ``compute``.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.row_report import (
    begin_rows,
    choose_device,
    copy_speed,
    fill_report,
    machine,
    table_of_rows,
)
from benchmarks.timing import REPEATS, host_us, median_ms, release
from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS
from moe_optim.screen import print_table, results_console

if TYPE_CHECKING:
    from torch import Tensor

    from moe_optim.kernels.plan import Backend

# Imports of torch take seconds, and are local to functions.

COMPUTED = (*PER_EXPERT_GRIDS, *(name for name, one in FORMATS.items() if one.directions_agree))
"""Values of ``compute`` for Transformer Engine's experts."""
SHAPES = {"cuda": [1536, 2048], "cpu": [64, 128]}
COLUMNS = {
    "format": "format",
    "copy_ms": "copy",
    "fraction_of_floor": "of floor",
    "host_us": "host us",
    "dequantize_ms": "dequantize",
    "dequantize_fraction": "of its floor",
    "step_ms": "step",
    "bf16_step_ms": "step in bf16",
    "step_ratio": "ratio",
}
"""Table columns: key of a row -> heading. The JSON contains all keys."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiesCase:
    """Experts of one linear, and the microbatches of one step through it."""

    experts: int
    rows: int
    cols: int
    microbatches: int
    tokens: int
    """Tokens of a microbatch, divided evenly among experts."""
    device: str


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``benchmarks copies``."""
    parser = kinds.add_parser(
        "copies",
        help="quantized copies of bf16 experts, and steps of Transformer Engine's linear with them",
        description="Copy bf16 experts as a format or grid represents them, in ms and relative to "
        "the time of reading and writing them. With Transformer Engine, run the microbatches of a "
        "step through its GroupedLinear with such copies and without.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--experts", type=int, default=32, metavar="N", help="experts (default 32)")
    shape = "rows and columns of an expert; default: 1536 2048; 64 128 on a CPU"
    add("--shape", type=int, nargs=2, metavar=("R", "C"), help=shape)
    formats = ", ".join(COMPUTED)
    add("--formats", choices=COMPUTED, nargs="+", default=COMPUTED, metavar="NAME", help=formats)
    add("--microbatches", type=int, default=8, metavar="N", help="of a step (default 8)")
    add("--tokens", type=int, default=16384, metavar="N", help="per microbatch (default 16384)")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if available")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE, row by row")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print a table, and write the results if requested.

    Raises:
        ConfigError: sizes are invalid, no GPU is present, or the file is not writable.
    """
    args.device = choose_device(args.device)
    rows, cols = args.shape = args.shape or SHAPES[args.device]
    if min(args.experts, rows, cols, args.microbatches) < 1 or args.tokens < args.experts:
        raise ConfigError(
            "--experts, --shape, --microbatches, --tokens: expected numbers above 0 and a token "
            f"per expert, got {args.experts}, {rows} {cols}, {args.microbatches} and "
            f"{args.tokens}. Give larger ones."
        )
    for name in args.formats:
        if name in FORMATS:
            FORMATS[name].check_shape((args.experts, rows, cols), "--shape")
    require_writable(args.json)
    case = CopiesCase(
        experts=args.experts,
        rows=rows,
        cols=cols,
        microbatches=args.microbatches,
        tokens=args.tokens // args.experts * args.experts,
        device=args.device,
    )
    report = begin_rows(_command(args), args.device)
    fill_report(report, measure(case, args.formats, copy_speed(report)), args.json, _progress)
    title = f"{case.experts} experts of {rows}x{cols}; {machine(report)}"
    table = table_of_rows(title, COLUMNS, report["rows"], texts=("format",))
    print_table(results_console(), table)
    return 0


def measure(case: CopiesCase, formats: Sequence[str], speed: float) -> Iterator[Row]:
    """Yield a row per format, given the copy speed in bytes per ms."""
    for name in formats:
        row = {"format": name, "experts": case.experts, "shape": f"{case.rows}x{case.cols}"}
        row |= _measure_copy(case, name, speed) | _measure_dequantization(case, name, speed)
        yield row | _measure_step(case, name)
        release(case.device)


def _measure_copy(case: CopiesCase, name: str, speed: float) -> Row:
    import torch

    generator = torch.Generator(case.device).manual_seed(0)
    shape = (case.experts, case.rows, case.cols)
    values = torch.empty(shape, dtype=torch.bfloat16, device=case.device)
    experts = [one.clone() for one in values.normal_(std=0.02, generator=generator)]
    copy, reference = (_make_copy(name, experts, backend) for backend in ("auto", "reference"))
    differing = copy().view(torch.int16) != reference().view(torch.int16)
    (copy_ms,) = median_ms([copy], case.device)
    passes = 3 if name in FORMATS and FORMATS[name].has_global_amax else 2
    return {
        "copy_ms": round(copy_ms, 4),
        "fraction_of_floor": round(passes * values.nbytes / speed / copy_ms, 3),
        "host_us": round(host_us(copy, case.device, repeats=REPEATS), 1),
        "differing_elements": int(differing.sum()),
    }


def _measure_dequantization(case: CopiesCase, name: str, speed: float) -> Row:
    """Time the slower direction of stored weights; None for grids, which store none."""
    import torch

    from moe_optim import ops

    if name not in FORMATS:
        return {"dequantize_ms": None, "dequantize_fraction": None}
    weights = torch.randn(case.experts, case.rows, case.cols, device=case.device).mul_(0.02)
    quantized = ops.quantize(weights, name)
    reads = [partial(ops.dequantize, quantized, way) for way in FORMATS[name].directions]
    slowest = max(median_ms(reads, case.device))
    data, scale = quantized.rowwise_data, quantized.rowwise_scale
    nbytes = data.nbytes + scale.nbytes + 2 * weights.numel()
    return {
        "dequantize_ms": round(slowest, 4),
        "dequantize_fraction": round(nbytes / speed / slowest, 3),
    }


def _make_copy(name: str, experts: "list[Tensor]", backend: "Backend") -> "Callable[[], Tensor]":
    """Return a function that copies experts [R, C]."""
    from moe_optim.calibration.fake_operations import fake_blocks, fake_quantized
    from moe_optim.experts.operands import live_amax, make_copy

    if (grid := PER_EXPERT_GRIDS.get(name)) is not None:
        amax = live_amax(experts).float()
        return lambda: fake_quantized(experts, amax, grid.bits, False, backend)
    if FORMATS[name].is_row_only:
        return lambda: fake_blocks(experts, name, backend)
    quantizer = make_copy(FORMATS[name], (len(experts), *experts[0].shape), name, backend)
    return lambda: quantizer.dequantize(experts, "rowwise", keep=False, amax=None)


def _measure_step(case: CopiesCase, format: str) -> Row:
    """Time a step with and without copies, alternately; None without Transformer Engine."""
    steps = [_make_step(case, compute) for compute in (format, None)]
    if None in steps:
        return {"step_ms": None, "bf16_step_ms": None, "step_ratio": None}
    copied, plain = median_ms([step for step in steps if step], case.device)
    return {
        "step_ms": round(copied, 4),
        "bf16_step_ms": round(plain, 4),
        "step_ratio": round(copied / plain, 4),
    }


def _make_step(case: CopiesCase, compute: str | None) -> Callable[[], None] | None:
    import torch

    from moe_optim.config import MoEOptimConfig
    from moe_optim.experts.operands import copies_in
    from moe_optim.experts.weight_copies import copy_weights

    linear = _make_linear(case)
    if linear is None:
        return None
    experts = torch.nn.ModuleList([linear])
    copy_weights(experts, MoEOptimConfig.from_mapping({"format": "bf16", "compute": compute}), "")
    splits = [case.tokens // case.experts] * case.experts
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": case.device}
    tokens = torch.randn(case.tokens, case.cols, **options).requires_grad_()
    gradient = torch.randn(case.tokens, case.rows, **options)

    def step() -> None:
        for copies in copies_in(experts):
            copies.begin_step()
        for _ in range(case.microbatches):
            linear(tokens, splits).backward(gradient)
            tokens.grad = None
            for weight in linear.parameters():
                weight.grad = None

    return step


def _make_linear(case: CopiesCase) -> Any:
    """Return Transformer Engine's linear with fused accumulation; None without a GPU or it."""
    import torch

    try:
        from transformer_engine.pytorch import GroupedLinear
    except ImportError:
        return None
    if case.device != "cuda":
        return None

    class Linear(GroupedLinear):
        _split_grouped_checkpoint_tensor = None  # by which Megatron's class is known
        _pg_collection = SimpleNamespace(expt_tp=None)

    options = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
    linear = Linear(case.experts, case.cols, case.rows, device=case.device, **options)
    for weight in linear.parameters():
        weight.main_grad = torch.zeros(weight.shape, device=case.device)
        weight.grad_added_to_main_grad = False
    return linear


def _command(args: argparse.Namespace) -> str:
    """Return the equivalent command line with all defaults explicit."""
    words = ["python", "-m", "benchmarks", "copies", "--experts", str(args.experts)]
    words += ["--shape", *map(str, args.shape), "--formats", *args.formats]
    words += ["--microbatches", str(args.microbatches), "--tokens", str(args.tokens)]
    words += ["--device", args.device, *(["--json", str(args.json)] if args.json else [])]
    return shlex.join(words)


def _progress(row: Row) -> str:
    return (
        f"{row['format']}: copy {row['copy_ms']} ms, {row['fraction_of_floor']} of its floor, host "
        f"{row['host_us']} us; step {row['step_ms']} ms, in bf16 {row['bf16_step_ms']} ms"
    )
