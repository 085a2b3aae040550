"""``moe-optim convert``: a checkpoint in another layout of experts, or in another format."""

import argparse
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optim.console.checkpoint_progress import open_view, progress_bar
from moe_optim.console.screen import results_console
from moe_optim.console.spelling import spell_bytes
from moe_optim.expert_keys.layouts import LAYOUTS

if TYPE_CHECKING:
    from moe_optim.checkpoints.conversion.conversion_plan import ConversionPlan, ConversionRequest

# What imports torch is imported where it is needed: it takes seconds.

FORMATS = ("safetensors", "torch_dist")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``convert`` command."""
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint with its experts in another layout or format",
        description="Read a torch_dist or safetensors checkpoint, a layer at a time, and write it "
        "with its experts in another layout, format or GLU interleave. Masters and moments are "
        "converted with the weights. Checksums that SRC has (torch_dist) are compared on the way. "
        "DST appears when it is complete. Megatron and a GPU are not needed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="a checkpoint; of a run's, the newest is taken")
    add("target", type=Path, metavar="DST", help="a folder that does not exist yet")
    names = ", ".join(LAYOUTS)
    add("--to", choices=LAYOUTS, required=True, metavar="LAYOUT", help=f"of {names}")
    add(
        "--from",
        choices=LAYOUTS,
        dest="source_layout",
        metavar="LAYOUT",
        help="how SRC keeps its experts, where several layouts fit or none is recorded",
    )
    add(
        "--glu-interleave",
        type=_rows,
        metavar="N",
        help="rows of gate and of up blocks that alternate in DST, 0: all of gate first (default: "
        "as SRC for Megatron's layouts, else 0)",
    )
    add(
        "--source-glu-interleave",
        type=_rows,
        metavar="N",
        help="the same of SRC, where it is not recorded (default: 0)",
    )
    add("--format", choices=FORMATS, help=f"of {', '.join(FORMATS)}; default: that of SRC")
    add(
        "--weights-only",
        action="store_true",
        help="leave masters, moments and all other state of the optimizer out",
    )
    add_naming(parser)


def add_naming(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a checkpoint does not."""
    add = parser.add_argument
    add(
        "--rename",
        action="append",
        default=[],
        metavar="FROM=TO",
        help="keys of the first checkpoint that begin with FROM begin with TO; may be repeated",
    )
    add(
        "--num-experts",
        type=_experts,
        metavar="N",
        help="how many experts a layer has, where it does not tell (layout legacy)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert and say what was done.

    Raises:
        ConfigError: the options contradict each other or the checkpoint, or DST exists.
        LayoutError: SRC does not hold complete experts and states, or DST cannot.
        StateError: SRC is damaged, or the disk too small.
    """
    from moe_optim.checkpoints.conversion.conversion import convert_checkpoint
    from moe_optim.checkpoints.conversion.conversion_plan import plan_conversion

    began = time.perf_counter()
    plan = plan_conversion(open_view(args.source, args.rename), _request(args))
    with progress_bar("converting", plan.total_bytes) as report:
        convert_checkpoint(plan, args.target, report)
    seconds = time.perf_counter() - began
    console = results_console()
    for line in _summary(plan, args, seconds):
        console.print(line)
    return 0


def _request(args: argparse.Namespace) -> "ConversionRequest":
    from moe_optim.checkpoints.conversion.conversion_plan import ConversionRequest
    from moe_optim.expert_keys.layouts import get_layout

    return ConversionRequest(
        to=get_layout(args.to),
        source_layout=get_layout(args.source_layout) if args.source_layout else None,
        glu_interleave=args.glu_interleave,
        source_glu_interleave=args.source_glu_interleave,
        format=args.format,
        weights_only=args.weights_only,
        num_experts=args.num_experts,
    )


def _summary(plan: "ConversionPlan", args: argparse.Namespace, seconds: float) -> list[str]:
    layers = sum(not one.prefix.startswith("optimizer.") for one in plan.sets)
    count = sum(len(one.keys) for one in plan.sets) + len(plan.others)
    speed = plan.total_bytes / 1e6 / max(seconds, 1e-9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    source, target = plan.sets[0].layout.name, plan.to.name
    lines = [
        f"{args.target}: {plan.format}, experts of {layers} layers from {source} to {target}, GLU "
        f"interleave {plan.source_interleave} to {plan.target_interleave}",
        f"{count:,} tensors, {spell_bytes(plan.total_bytes)} in {seconds:.1f} s, "
        f"{speed:,.0f} MB/s; peak memory {spell_bytes(peak)}",
    ]
    if plan.format == "torch_dist":
        lines.append("torch_dist stores grouped, indexed and sequential experts alike.")
    tensors = sum(name in plan.view.tensors for name in plan.left_out)
    if plan.left_out:
        objects = len(plan.left_out) - tensors
        why = "--weights-only" if args.weights_only else "safetensors holds tensors alone"
        lines.append(
            f"Left out: {tensors} tensors of the optimizer and {objects} objects, such as "
            f"arguments and random states ({why})."
        )
    return lines


def _rows(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of rows, got '{text}'")
    return int(text)


def _experts(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of experts, got '{text}'")
    return int(text)
