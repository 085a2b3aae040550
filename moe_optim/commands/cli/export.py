"""Write a checkpoint with quantized experts for vLLM and SGLang.

Reads a torch_dist or safetensors checkpoint and quantizes its experts, one at a time, as training
does, from masters if it contains them. Writes safetensors with Hugging Face names and the
quantization_config that engines read. Other tensors keep their dtype. torch_dist models are limited
to those that convert --to hf supports. DST appears when it is complete. Megatron and a GPU are not
needed.
"""

import argparse
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.commands.cli.options import add_source_and_target
from moe_optim.commands.console.checkpoint_paths import find_checkpoint
from moe_optim.commands.console.checkpoint_progress import open_reader, write_plan
from moe_optim.commands.console.workers import add_workers, peak_memory
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS
from moe_optim.screen import results_console
from moe_optim.spelling import spell_bytes

if TYPE_CHECKING:
    from moe_optim.commands.export.export import ExportPlan, ExportRequest

# Modules that import torch, which takes seconds, are imported locally.

_IN_MXFP8 = ("mxfp8", "mxfp8_2d", "mxfp8_rows")
CONVENTIONS: Mapping[str, Collection[str]] = {
    "compressed_tensors": FORMATS,
    "modelopt": (*_IN_MXFP8, "nvfp4", "nvfp4_rows"),
    "deepseek": (*_IN_MXFP8, "fp8_block", "fp8_block_fp32"),
}
"""Convention -> formats that it names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_source_and_target(parser)
    add = parser.add_argument
    text = f"format of the experts: {', '.join(FORMATS)}"
    add("--format", choices=FORMATS, required=True, metavar="FORMAT", help=text)
    text = (
        f"names of data and scales: {', '.join(CONVENTIONS)} (default: modelopt for NVFP4, "
        "deepseek for blockwise FP8, else compressed_tensors)"
    )
    add("--convention", choices=CONVENTIONS, metavar="CONVENTION", help=text)
    text = (
        "also write the input scale of each weight, from calibrated amaxes, so that engines "
        "quantize activations to NVFP4"
    )
    add("--input-scales", action="store_true", help=text)
    text = "config.json of the model (default: that of SRC)"
    add("--config", type=Path, metavar="FILE", help=text)
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Export, and print a summary."""
    _check_convention(args)
    find_checkpoint(args.source)  # before the import of torch, which takes seconds
    require_writable(args.target, expected="a new folder")
    from moe_optim.commands.export.export import plan_export

    began = time.perf_counter()
    plan = plan_export(open_reader(args.source), _request(args), args.config)
    write_plan("exporting", plan, args)
    lines = _summary(plan, args, time.perf_counter() - began)
    results_console().print(*lines, sep="\n")
    return 0


def _check_convention(args: argparse.Namespace) -> None:
    """Raise ConfigError for a convention that has no names for the format."""
    known = [name for name, formats in CONVENTIONS.items() if args.format in formats]
    if args.convention not in (None, *known):
        raise ConfigError(
            f"--convention: expected {' or '.join(known)} for {args.format}, got "
            f"{args.convention}. Omit it for the default."
        )


def _request(args: argparse.Namespace) -> "ExportRequest":
    from moe_optim.commands.export.export import ExportRequest
    from moe_optim.experts.keys.layouts import get_layout
    from moe_optim.formats import get_format
    from moe_optim.rollout.conventions import find_convention

    format = get_format(args.format)
    return ExportRequest(
        format=format,
        convention=find_convention(format, args.convention),
        source_layout=get_layout(args.source_layout) if args.source_layout else None,
        source_glu_interleave=args.source_glu_interleave,
        tokenizer=args.tokenizer,
        has_input_scales=args.input_scales,
    )


def _summary(plan: "ExportPlan", args: argparse.Namespace, seconds: float) -> list[str]:
    convention = plan.request.convention
    origin = "masters" if plan.reads_masters else "weights"
    lines = [
        f"{args.target}: {plan.request.format.name} experts of {len(plan.experts)} layers, as "
        f"{convention.name} names them, for {' and '.join(convention.engines)}",
        f"quantized from {origin}; {spell_bytes(plan.total_bytes)} read in {seconds:.1f} s; peak "
        f"memory {spell_bytes(peak_memory())}",
    ]
    if not plan.reads_masters:
        lines.append(
            "Weights that were quantized in training and dequantized for the checkpoint may get "
            "other scales. Export a checkpoint with masters to get the bytes of training."
        )
    return lines
