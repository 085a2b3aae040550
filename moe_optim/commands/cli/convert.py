"""Convert a torch_dist or safetensors checkpoint, in bounded memory.

--to converts the weights of a whole Qwen3-MoE or DeepSeek-V3 model: names, shapes and
configuration. Weights published in blockwise FP8, MXFP4 or INT4 become bf16; --to hf dequantizes
any such model. --experts converts only the layout of experts: every other tensor keeps its name,
and masters and moments saved by name are converted too. Checksums in SRC (torch_dist)
are verified. DST appears when it is complete. Megatron, transformers and a GPU are not needed.
"""

import argparse
import shlex
import time
from typing import TYPE_CHECKING

from moe_optim.checkpoint.files.publishing import require_writable
from moe_optim.commands.cli.options import add_naming, add_source_and_target
from moe_optim.commands.console.checkpoint_paths import (
    find_checkpoint,
    is_torch_dist,
    require_target,
)
from moe_optim.commands.console.checkpoint_progress import open_reader, write_plan
from moe_optim.commands.console.workers import add_workers, peak_memory, whole_number
from moe_optim.environment import find_package
from moe_optim.errors import refuse
from moe_optim.experts.keys.layouts import LAYOUTS
from moe_optim.screen import results_console
from moe_optim.spelling import spell_bytes

if TYPE_CHECKING:
    from moe_optim.checkpoint.files.reader import CheckpointReader
    from moe_optim.commands.conversion.conversion import ConversionPlan
    from moe_optim.commands.conversion.file_plan import FilePlan
    from moe_optim.rollout.families import Implementation

# Modules that import torch, which takes seconds, are imported locally.

FORMATS = ("safetensors", "torch_dist")
TARGETS = ("hf", "megatron")
SIDES: "tuple[Implementation, ...]" = ("transformer_engine", "local")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_source_and_target(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    text = "convert the whole model: hf for transformers, megatron for --load"
    what.add_argument("--to", choices=TARGETS, help=text)
    text = f"convert only the expert layout: {', '.join(LAYOUTS)}"
    what.add_argument("--experts", choices=LAYOUTS, metavar="LAYOUT", help=text)
    add = parser.add_argument
    text = (
        "rows per block where gate and up alternate in DST, 0 for all gate rows first (default: "
        "that of SRC for Megatron's layouts, else 0)"
    )
    add("--glu-interleave", type=whole_number, metavar="N", help=text)
    text = (
        f"Megatron's --transformer-impl that will load DST: {' or '.join(SIDES)} (--to "
        f"megatron; default: {SIDES[0]})"
    )
    add("--transformer-impl", choices=SIDES, metavar="IMPL", help=text)
    text = f"file format: {', '.join(FORMATS)} (--experts; default: that of SRC)"
    add("--format", choices=FORMATS, metavar="FORMAT", help=text)
    text = "omit masters, moments and all other optimizer state (--experts)"
    add("--weights-only", action="store_true", help=text)
    add_naming(parser, "SRC")
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Convert, and print a summary."""
    _refuse_mixed(args)
    source = find_checkpoint(args.source)  # before the import of torch, which takes seconds
    if args.experts:
        found = "torch_dist" if is_torch_dist(source) else "safetensors"
        require_target(args.experts, args.format or found, args.glu_interleave)
    require_writable(args.target, expected="a new folder")
    began = time.perf_counter()
    convert = _convert_model if args.to else _convert_layout
    lines = convert(args, began)
    results_console().print(*lines, sep="\n")
    return 0


def _refuse_mixed(args: argparse.Namespace) -> None:
    asked = f"--to {args.to}" if args.to else f"--experts {args.experts}"
    refuse(
        {
            "--from": args.to and args.source_layout,
            "--format": args.to and args.format,
            "--weights-only": args.to and args.weights_only,
            "--rename": args.to and args.rename,
            "--num-experts": args.to and args.num_experts,
            "--glu-interleave": args.to == "hf" and args.glu_interleave,
            "--tokenizer": args.to != "hf" and args.tokenizer,
            "--transformer-impl": args.to != "megatron" and args.transformer_impl,
        },
        expected=f"{asked}: expected only its own options",
        remedy="Remove it: `moe-optim convert --help` lists the options of each.",
    )


def _convert_model(args: argparse.Namespace, began: float) -> list[str]:
    from moe_optim.commands.conversion.model_conversion import ModelRequest, plan_model
    from moe_optim.commands.hugging_face.models import megatron_flags

    side: Implementation = args.transformer_impl or SIDES[0]
    request = ModelRequest(
        to=args.to,
        transformer_impl=side,
        glu_interleave=args.glu_interleave or 0,
        source_glu_interleave=args.source_glu_interleave,
        tokenizer=args.tokenizer,
    )
    reader = open_reader(args.source)
    if args.to == "hf" and reader.format == "safetensors":
        return _dequantize(args, reader, began)
    plan = plan_model(reader, request)
    write_plan("converting", plan, args)
    layers = len(plan.model.anatomy.moe_layers)
    lines = [
        f"{args.target}: {plan.model.family.architecture}, {plan.model.anatomy.num_layers} layers, "
        f"{layers} with experts",
        _speed(plan, began),
    ]
    if args.to == "megatron":
        lines.append(f"Megatron's flags: {shlex.join(megatron_flags(plan.model, side))}")
        lines += _absent_layers(side, is_latent=plan.model.family.name == "deepseek_v3")
    return lines + _left_out(plan, "--to converts weights only")


def _dequantize(args: argparse.Namespace, reader: "CheckpointReader", began: float) -> list[str]:
    from moe_optim.commands.conversion.model_conversion import plan_dequantization

    refuse(
        {"--source-glu-interleave": args.source_glu_interleave},
        expected=f"--to hf: expected rows to stay in the order of {args.source}",
        remedy="Remove it.",
    )
    plan = plan_dequantization(reader, args.tokenizer)
    write_plan("dequantizing", plan, args)
    return [
        f"{args.target}: quantized weights in bf16, all other tensors unchanged",
        _speed(plan, began),
    ]


def _absent_layers(side: "Implementation", *, is_latent: bool) -> list[str]:
    if side == "local":
        no_layers = "Megatron's local layers have no latent attention: give layers by --spec."
        return [no_layers] if is_latent else []
    if find_package("transformer-engine") is not None:
        return []
    remedy = (
        "which is not installed here. To train without it, convert with --transformer-impl local"
    )
    if is_latent:
        remedy = "which latent attention needs"
    return [f"These flags start a run with Transformer Engine, {remedy}."]


def _convert_layout(args: argparse.Namespace, began: float) -> list[str]:
    from moe_optim.commands.conversion.conversion import ConversionRequest, plan_conversion
    from moe_optim.commands.conversion.layer_view import LayerView, parse_renames
    from moe_optim.experts.keys.layouts import get_layout

    request = ConversionRequest(
        to=get_layout(args.experts),
        source_layout=get_layout(args.source_layout) if args.source_layout else None,
        glu_interleave=args.glu_interleave,
        source_glu_interleave=args.source_glu_interleave,
        format=args.format,
        weights_only=args.weights_only,
        num_experts=args.num_experts,
    )
    reader = open_reader(args.source)
    plan = plan_conversion(LayerView(reader, parse_renames(args.rename)), request)
    write_plan("converting", plan, args)
    return _summary(plan, args, began)


def _summary(plan: "ConversionPlan", args: argparse.Namespace, began: float) -> list[str]:
    layers = sum(not one.prefix.startswith("optimizer.") for one in plan.sets)
    source, target = plan.sets[0].layout.name, plan.to.name
    before, after = plan.source_interleave, plan.target_interleave
    interleave = f", GLU interleave {before} to {after}" if before or after else ""
    lines = [
        f"{args.target}: {plan.format}, experts of {layers} layers from {source} to {target}"
        f"{interleave}",
        _speed(plan, began),
    ]
    if plan.stored is not None and plan.objects:
        foreign = plan.stored.foreign_objects(plan.objects)
        lines += [
            f"Copied unchanged, may run code when Megatron unpickles it: {name}: {why}"
            for name, why in foreign.items()
        ]
    if plan.format == "torch_dist":
        lines.append("torch_dist stores grouped, indexed and sequential experts alike.")
    why = "--weights-only" if args.weights_only else "safetensors stores only tensors"
    return lines + _left_out(plan, why)


def _speed(plan: "FilePlan", began: float) -> str:
    seconds, peak = time.perf_counter() - began, peak_memory()
    speed = plan.total_bytes / max(seconds, 1e-9)
    return (
        f"{plan.num_written:,} tensors written, {spell_bytes(plan.total_bytes)} in "
        f"{seconds:.1f} s, {spell_bytes(speed)}/s; peak memory {spell_bytes(peak)}"
    )


def _left_out(plan: "FilePlan", why: str) -> list[str]:
    tensors = sum(name in plan.view.tensors for name in plan.left_out)
    parts = [f"{tensors} optimizer tensors"] if tensors else []
    if objects := len(plan.left_out) - tensors:
        parts.append(f"{objects} objects, such as arguments and random states")
    return [f"Omitted: {' and '.join(parts)} ({why})."] if parts else []
