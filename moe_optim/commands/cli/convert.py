"""Read a torch_dist or safetensors checkpoint, a layer at a time, and write it anew.

--to converts a whole Qwen3-MoE or DeepSeek-V3: names, shapes and configuration, of weights alone.
--experts converts nothing but the layout of experts: everything else keeps its name, and masters
and moments come along, by name where they were flat. Checksums that SRC has (torch_dist) are
compared on the way. DST appears when it is complete. Megatron, transformers and a GPU are not
needed.
"""

import argparse
import resource
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optim.commands.console.checkpoint_progress import open_reader, progress_bar
from moe_optim.environment import find_package
from moe_optim.errors import refuse
from moe_optim.experts.keys.layouts import LAYOUTS
from moe_optim.screen import results_console
from moe_optim.spelling import spell_bytes

if TYPE_CHECKING:
    from moe_optim.commands.conversion.conversion_plan import ConversionPlan
    from moe_optim.commands.conversion.model_plan import ModelPlan
    from moe_optim.rollout.families import Implementation

# What imports torch is imported where it is needed: it takes seconds.

FORMATS = ("safetensors", "torch_dist")
TARGETS = ("hf", "megatron")
SIDES: "tuple[Implementation, ...]" = ("transformer_engine", "local")


HELP = "write a checkpoint for transformers or for Megatron, or change its expert layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="a checkpoint; of a run's, the newest is taken")
    add("target", type=Path, metavar="DST", help="a folder that does not exist yet")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--to",
        choices=TARGETS,
        metavar="SIDE",
        help=f"the whole model, of {' or '.join(TARGETS)}: hf is what transformers loads, megatron "
        "what --load takes",
    )
    what.add_argument(
        "--experts",
        choices=LAYOUTS,
        metavar="LAYOUT",
        help=f"the expert layout alone, of {', '.join(LAYOUTS)}",
    )
    add(
        "--glu-interleave",
        type=whole_number,
        metavar="N",
        help="rows of gate and of up blocks that alternate in DST, 0: all of gate first (default: "
        "as SRC for Megatron's layouts, else 0)",
    )
    add(
        "--source-glu-interleave",
        type=whole_number,
        metavar="N",
        help="the same of SRC, where it is not recorded (default: 0)",
    )
    _add_model_options(parser.add_argument_group("with --to"))
    _add_layout_options(parser.add_argument_group("with --experts"))
    add_naming(parser)


def _add_model_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="pass the tokenizer files of this folder on to DST, and the special tokens of its "
        "config.json (--to hf)",
    )
    add(
        "--transformer-impl",
        choices=SIDES,
        help=f"whose layers will load DST, as Megatron's flag: {' or '.join(SIDES)} (--to "
        f"megatron; default: {SIDES[0]})",
    )


def _add_layout_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--from",
        choices=LAYOUTS,
        dest="source_layout",
        metavar="LAYOUT",
        help="how SRC keeps its experts, where several layouts fit or none is recorded",
    )
    add("--format", choices=FORMATS, help=f"of {', '.join(FORMATS)}; default: that of SRC")
    add(
        "--weights-only",
        action="store_true",
        help="leave masters, moments and all other state of the optimizer out",
    )


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
        type=_number_above_zero,
        metavar="N",
        help="how many experts a layer has, where it does not tell (layout legacy)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done.

    Raises:
        ConfigError: the options contradict each other or the checkpoint, or DST exists.
        LayoutError: SRC does not hold a complete model, experts and states, or DST cannot.
        StateError: SRC is damaged, or the disk too small.
    """
    _refuse_mixed(args)
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
        expected=f"{asked}: expected options that it has",
        remedy="Leave it out: `moe-optim convert --help` says what goes with what.",
    )


def _convert_model(args: argparse.Namespace, began: float) -> list[str]:
    from moe_optim.commands.conversion.model_conversion import convert_model
    from moe_optim.commands.conversion.model_plan import ModelRequest, plan_model
    from moe_optim.commands.hugging_face.models import megatron_flags

    side: Implementation = args.transformer_impl or SIDES[0]
    request = ModelRequest(
        to=args.to,
        transformer_impl=side,
        glu_interleave=args.glu_interleave or 0,
        source_glu_interleave=args.source_glu_interleave,
        tokenizer=args.tokenizer,
    )
    plan = plan_model(open_reader(args.source), request)
    with progress_bar("converting", plan.total_bytes) as report:
        convert_model(plan, args.target, report)
    layers = len(plan.model.anatomy.moe_layers)
    lines = [
        f"{args.target}: {plan.model.family.architecture}, {plan.model.anatomy.num_layers} layers, "
        f"{layers} with experts",
        _speed(plan.num_tensors, plan.total_bytes, began),
    ]
    if args.to == "megatron":
        lines.append(f"Megatron's flags: {shlex.join(megatron_flags(plan.model, side))}")
        lines += _absent_layers(side, is_latent=plan.model.family.name == "deepseek_v3")
    return lines + _left_out(plan, "--to takes weights alone")


def _absent_layers(side: "Implementation", *, is_latent: bool) -> list[str]:
    if side == "local":
        no_layers = "Megatron's local layers have no latent attention: give layers by --spec."
        return [no_layers] if is_latent else []
    if find_package("transformer-engine") is not None:
        return []
    remedy = "which is not here: without it convert with --transformer-impl local"
    if is_latent:
        remedy = "which latent attention needs"
    return [f"These flags start a run where Transformer Engine is, {remedy}."]


def _convert_layout(args: argparse.Namespace, began: float) -> list[str]:
    from moe_optim.commands.conversion.conversion import convert_checkpoint
    from moe_optim.commands.conversion.conversion_plan import ConversionRequest, plan_conversion
    from moe_optim.commands.conversion.flat_states import states_by_name
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
    shown = reader if args.weights_only else states_by_name(reader)
    plan = plan_conversion(LayerView(shown, parse_renames(args.rename)), request)
    with progress_bar("converting", plan.total_bytes) as report:
        convert_checkpoint(plan, args.target, report)
    return _summary(plan, args, began)


def _summary(plan: "ConversionPlan", args: argparse.Namespace, began: float) -> list[str]:
    layers = sum(not one.prefix.startswith("optimizer.") for one in plan.sets)
    count = sum(len(one.keys) for one in plan.sets) + len(plan.others)
    source, target = plan.sets[0].layout.name, plan.to.name
    lines = [
        f"{args.target}: {plan.format}, experts of {layers} layers from {source} to {target}, GLU "
        f"interleave {plan.source_interleave} to {plan.target_interleave}",
        _speed(count, plan.total_bytes, began),
    ]
    if plan.stored is not None and plan.objects:
        foreign = plan.stored.foreign_objects(plan.objects)
        lines += [
            f"Copied as it is, and may run code where Megatron unpickles it: {name}: {why}"
            for name, why in foreign.items()
        ]
    if plan.format == "torch_dist":
        lines.append("torch_dist stores grouped, indexed and sequential experts alike.")
    why = "--weights-only" if args.weights_only else "safetensors holds tensors alone"
    return lines + _left_out(plan, why)


def _speed(count: int, nbytes: int, began: float) -> str:
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"{count:,} tensors, {spell_bytes(nbytes)} in {seconds:.1f} s, "
        f"{nbytes / 1e6 / max(seconds, 1e-9):,.0f} MB/s; peak memory {spell_bytes(peak)}"
    )


def _left_out(plan: "ConversionPlan | ModelPlan", why: str) -> list[str]:
    tensors = sum(name in plan.view.tensors for name in plan.left_out)
    parts = [f"{tensors} tensors of the optimizer"] if tensors else []
    if objects := len(plan.left_out) - tensors:
        parts.append(f"{objects} objects, such as arguments and random states")
    return [f"Left out: {' and '.join(parts)} ({why})."] if parts else []


def whole_number(text: str) -> int:
    """Return the number that an option gives; a type for argparse."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number, got '{text}'")
    return int(text)


def _number_above_zero(text: str) -> int:
    if not whole_number(text):
        raise argparse.ArgumentTypeError("expected a number above 0, got 0")
    return int(text)
