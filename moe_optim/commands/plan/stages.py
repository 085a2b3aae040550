"""MoE layers of each model chunk of each pipeline stage, by Megatron's rules.

Equal to ``get_num_layers_to_build``, ``get_transformer_layer_offset`` and
``PipelineParallelLayerLayout``; tests compare them.
"""

import argparse
import re
from collections.abc import Sequence
from itertools import islice

from moe_optim.commands.hugging_face.family_rules import layer_faults, layers_with_experts
from moe_optim.errors import ConfigError

_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
"""Repetitions in a layout, ``(ab|)*2`` and ``t*4``, in the order of their expansion."""
_KINDS = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}


def count_moe_layers(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the MoE layers of each chunk for each stage; ConfigError if they do not divide.

    An MTP layer is of the same kind as the last layer.
    """
    if faults := layer_faults(args.num_layers, args.moe_layer_freq):
        raise ConfigError(f"{faults[0]}. Correct it.")
    pattern = layers_with_experts(args.num_layers, args.moe_layer_freq)
    if not any(pattern):
        raise ConfigError("--moe-layer-freq: expected a layer with experts, got none. Correct it.")
    return _count(args, pattern)


def count_layers(args: argparse.Namespace) -> list[int]:
    """Return all layers of each stage, MTP layers among them; raises as above."""
    return [sum(chunks) for chunks in _count(args, [1] * args.num_layers)]


def _count(args: argparse.Namespace, pattern: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the layers marked by ``pattern`` of each chunk for each stage."""
    further = args.mtp_num_layers or 0
    if args.pipeline_model_parallel_layout is not None:
        return _laid_out(args, pattern, further)
    *stages, (*chunks, last) = _take(pattern, _even_layers(args))
    return [*stages, (*chunks, last + pattern[-1] * further)]


def _take(pattern: Sequence[int], layers: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the number of MoE layers in each chunk of each stage.

    Layers are numbered chunk by chunk, and within a chunk by stage.
    """
    left = iter(pattern)
    chunks = [[sum(islice(left, count)) for count in chunk] for chunk in zip(*layers, strict=True)]
    return [*zip(*chunks, strict=True)]


def _even_layers(args: argparse.Namespace) -> list[list[int]]:
    """Return the decoder layers of each chunk of each stage without a layout."""
    pipeline, virtual = args.pipeline_model_parallel_size, _virtual_stages(args)
    embedding = args.account_for_embedding_in_pipeline_split
    loss = args.account_for_loss_in_pipeline_split
    ends = {
        0: args.decoder_first_pipeline_num_layers,
        pipeline - 1: args.decoder_last_pipeline_num_layers,
    }
    given = {stage: count for stage, count in ends.items() if count is not None}
    if given and (embedding or loss):
        raise _unfit(
            args,
            "embedding or loss counted as layers beside a first or last stage with layers of its "
            "own",
        )
    left, others = args.num_layers + embedding + loss - sum(given.values()), pipeline - len(given)
    if left < 0 or (left % others if others else left):
        raise _unfit(args, f"{left} layers for {others} stages")
    layers = []
    for stage in range(pipeline):
        count = given.get(stage, left // max(others, 1))
        if count % virtual:
            raise _unfit(args, f"{count} layers of a stage for {virtual} chunks")
        layers.append([count // virtual] * virtual)
    layers[0][0] -= embedding
    layers[-1][-1] -= loss
    if min(map(min, layers)) < 0:
        raise _unfit(args, "fewer layers than embedding and loss take")
    return layers


def _virtual_stages(args: argparse.Namespace) -> int:
    pipeline = args.pipeline_model_parallel_size
    virtual: int = args.num_virtual_stages_per_pipeline_rank or 1
    flag = "--num-virtual-stages-per-pipeline-rank"
    if args.num_layers_per_virtual_pipeline_stage is not None:
        flag, layers = "--num-layers-per-virtual-pipeline-stage", args.num_layers
        layers += args.account_for_embedding_in_pipeline_split
        layers += args.account_for_loss_in_pipeline_split
        chunk = args.num_layers_per_virtual_pipeline_stage
        check_divides("the layers of a pipeline stage,", layers // pipeline, flag, chunk)
        virtual = layers // pipeline // chunk
    if virtual > 1 and pipeline == 1:
        raise ConfigError(
            f"{flag}: expected --pipeline-model-parallel-size above 1, got 1. Remove the flag."
        )
    return virtual


def _unfit(args: argparse.Namespace, got: str) -> ConfigError:
    return ConfigError(
        f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: expected stages that "
        f"Megatron can fill with --num-layers {args.num_layers}, got {got}. Change one "
        "of the two, or give --decoder-first-pipeline-num-layers or "
        "--decoder-last-pipeline-num-layers."
    )


def _laid_out(
    args: argparse.Namespace, pattern: Sequence[int], further: int
) -> list[tuple[int, ...]]:
    """Count by ``--pipeline-model-parallel-layout``."""
    pipeline, text = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    parts = _write_out(text).split("|")
    if fault := _fault_of_layout(parts, pipeline, args.num_layers, further):
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text}: expected one that Megatron takes, got "
            f"{fault}. Correct it."
        )
    of_stages = [parts[stage::pipeline] for stage in range(pipeline)]
    decoder = _take(pattern, [[part.count("t") for part in chunks] for chunks in of_stages])
    return [
        tuple(own + pattern[-1] * part.count("m") for own, part in zip(counts, chunks, strict=True))
        for counts, chunks in zip(decoder, of_stages, strict=True)
    ]


def _write_out(text: str) -> str:
    """Return a layout without commas and repetitions; ConfigError for too many of them."""
    if re.search(r"\d{4}", text):
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text[:60]}: expected repetitions up to 999, got "
            "more. Correct it."
        )
    text = text.replace(",", "")
    for repeated in _REPEATED:
        text = repeated.sub(lambda found: found[1] * int(found[2]), text)
    return text


def _fault_of_layout(
    parts: Sequence[str], pipeline: int, num_layers: int, further: int
) -> str | None:
    """Return Megatron's reason to refuse the parts of a layout."""
    layers = "".join(parts)
    if unknown := set(layers) - _KINDS.keys():
        known = ", ".join(f"{letter} ({kind})" for letter, kind in _KINDS.items())
        return f"{', '.join(sorted(unknown))} beside {known}"
    if len(parts) % pipeline:
        return f"{len(parts)} parts for --pipeline-model-parallel-size {pipeline}"
    for letter, number in {"E": 1, "t": num_layers, "m": further, "L": 1}.items():
        if layers.count(letter) != number:
            return f"{letter} ({_KINDS[letter]}) {layers.count(letter)} times, not {number}"
    if not (layers.startswith("E") and layers.endswith("L")):
        return "an embedding (E) that is not first, or a loss (L) that is not last"
    if further and "t" in layers[layers.index("m") :]:
        return "a decoder layer (t) behind an MTP layer (m)"
    with_further = [index for index, part in enumerate(parts) if "m" in part]
    if len(with_further) > 1 or any(index < len(parts) - pipeline for index in with_further):
        return "MTP layers (m) in several parts, or not in the last one of a stage"
    return None


def check_divides(whole: str, number: int, part: str, divisor: int) -> None:
    """Raise ConfigError unless ``divisor``, named ``part``, divides ``number``."""
    if number % divisor:
        raise ConfigError(
            f"megatron_args: expected {part} to divide {whole} {number}, got {divisor}. Change one "
            "of the two."
        )
