"""Write a checkpoint that vLLM and SGLang load, its experts quantized.

Reads a torch_dist or safetensors checkpoint, a layer at a time, quantizes its experts as training
does, from their masters where there are some, and writes safetensors under the names of Hugging
Face, with the quantization_config of engines. Everything but experts keeps its dtype. Models of
torch_dist are those that convert --to hf takes. DST appears when it is complete. Megatron and a GPU
are not needed.
"""

import argparse
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optim.commands.cli.convert import whole_number
from moe_optim.commands.console.checkpoint_progress import open_reader, progress_bar
from moe_optim.experts.keys.layouts import LAYOUTS
from moe_optim.formats import FORMATS
from moe_optim.screen import results_console
from moe_optim.spelling import spell_bytes

if TYPE_CHECKING:
    from moe_optim.commands.export.export_plan import ExportPlan, ExportRequest

# What imports torch is imported where it is needed: it takes seconds.

CONVENTIONS = ("compressed_tensors", "modelopt", "deepseek")


HELP = "write a checkpoint that vLLM and SGLang load, its experts quantized"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="a checkpoint; of a run's, the newest is taken")
    add("target", type=Path, metavar="DST", help="a folder that does not exist yet")
    add("--format", choices=FORMATS, required=True, help=f"of {', '.join(FORMATS)}")
    add(
        "--convention",
        choices=CONVENTIONS,
        help="how data and scales are called (default: compressed_tensors for MXFP8, modelopt for "
        "NVFP4, deepseek for FP8 blocks)",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of the model (default: what SRC says)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="pass the tokenizer files of this folder on to DST (default: those beside SRC)",
    )
    add(
        "--from",
        choices=LAYOUTS,
        dest="source_layout",
        metavar="LAYOUT",
        help="how SRC keeps its experts, where several layouts fit or none is recorded",
    )
    add(
        "--source-glu-interleave",
        type=whole_number,
        metavar="N",
        help="rows of gate and of up blocks that alternate in SRC, where it is not recorded",
    )


def run(args: argparse.Namespace) -> int:
    """Export, and print what was done.

    Raises:
        ConfigError: the options contradict each other or the checkpoint, or DST exists.
        LayoutError: SRC does not hold complete experts, or the format cannot hold them.
        StateError: SRC is damaged, or the disk too small.
    """
    from moe_optim.commands.export.export import export_checkpoint
    from moe_optim.commands.export.export_plan import plan_export

    began = time.perf_counter()
    plan = plan_export(open_reader(args.source), _request(args), args.config)
    with progress_bar("exporting", plan.total_bytes) as report:
        export_checkpoint(plan, args.target, report)
    lines = _summary(plan, args, time.perf_counter() - began)
    results_console().print(*lines, sep="\n")
    return 0


def _request(args: argparse.Namespace) -> "ExportRequest":
    from moe_optim.commands.export.export_plan import ExportRequest
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
    )


def _summary(plan: "ExportPlan", args: argparse.Namespace, seconds: float) -> list[str]:
    convention = plan.request.convention
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    origin = "masters" if plan.reads_masters else "weights"
    lines = [
        f"{args.target}: {plan.request.format.name} experts of {len(plan.experts)} layers, as "
        f"{convention.name} names them, for {' and '.join(convention.engines)}",
        f"quantized from {origin}; {spell_bytes(plan.total_bytes)} read in {seconds:.1f} s; peak "
        f"memory {spell_bytes(peak)}",
    ]
    if not plan.reads_masters:
        lines.append(
            "Weights that were quantized in training and dequantized for the checkpoint may come "
            "out with other scales. Export a checkpoint with masters for the bytes of training."
        )
    return lines
