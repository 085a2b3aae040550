"""How many MoE layers each model chunk of each pipeline stage has, by Megatron's rules.

The counts of ``get_num_layers_to_build``, ``get_transformer_layer_offset`` and
``PipelineParallelLayerLayout``; tests hold them against those.
"""

import argparse
import re
from collections.abc import Sequence

from moe_optim.commands.hugging_face.values import MOST_LAYERS
from moe_optim.errors import ConfigError

_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
"""``(ab|)*2`` and ``t*4`` of a layout, in the order in which they are written out."""
_MOST_LETTERS, _DIGITS = 16 * MOST_LAYERS, 9  # of a layout written out, and of a number in it
_KINDS = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}


def count_moe_layers(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the MoE layers of each chunk, for each stage.

    A layer that predicts a further token is as the last layer is.

    Args:
        args: parsed flags.

    Raises:
        ConfigError: layers cannot be cut like that.
    """
    pattern = _moe_pattern(args.moe_layer_freq, args.num_layers)
    further = args.mtp_num_layers or 0
    if args.pipeline_model_parallel_layout is not None:
        return _laid_out(args, pattern, further)
    *stages, (*chunks, last) = _take(pattern, _even_layers(args))
    return [*stages, (*chunks, last + pattern[-1] * further)]


def _take(pattern: Sequence[int], layers: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the MoE layers among those of each chunk of each stage.

    Layers are numbered chunk by chunk, and in a chunk by stage.
    """
    found: list[list[int]] = [[] for _ in layers]
    first = 0
    for chunk in zip(*layers, strict=True):
        for stage, count in enumerate(chunk):
            found[stage].append(sum(pattern[first : first + count]))
            first += count
    return [tuple(chunks) for chunks in found]


def _even_layers(args: argparse.Namespace) -> list[list[int]]:
    """Return how many layers of the decoder each chunk of each stage has."""
    virtual = _virtual_stages(args)
    of_stages = _layers_of_stages(args)
    layers = []
    for count in of_stages:
        _require(count % virtual == 0, args, f"{count} layers of a stage for {virtual} chunks")
        layers.append([count // virtual] * virtual)
    layers[0][0] -= args.account_for_embedding_in_pipeline_split
    layers[-1][-1] -= args.account_for_loss_in_pipeline_split
    _require(min(map(min, layers)) >= 0, args, "fewer layers than embedding and loss take")
    return layers


def _layers_of_stages(args: argparse.Namespace) -> list[int]:
    """Return the layers of each stage, embedding and loss among them where they count as one."""
    pipeline = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    embedding = args.account_for_embedding_in_pipeline_split
    loss = args.account_for_loss_in_pipeline_split
    given = {0: first, pipeline - 1: last}
    given = {stage: count for stage, count in given.items() if count is not None}
    _require(
        not given or not (embedding or loss),
        args,
        "embedding or loss counted as layers beside a first or last stage with layers of its own",
    )
    left = args.num_layers + embedding + loss - sum(given.values())
    others = pipeline - len(given)
    fits = left == 0 if others == 0 else left >= 0 and left % others == 0
    _require(fits, args, f"{left} layers for {others} stages")
    return [given.get(stage, left // max(others, 1)) for stage in range(pipeline)]


def _virtual_stages(args: argparse.Namespace) -> int:
    """Return the model chunks of a stage."""
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


def _require(is_so: bool, args: argparse.Namespace, got: str) -> None:
    if not is_so:
        raise ConfigError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: expected stages "
            f"that Megatron can fill with --num-layers {args.num_layers}, got {got}. Change one of "
            "the two."
        )


def _laid_out(
    args: argparse.Namespace, pattern: Sequence[int], further: int
) -> list[tuple[int, ...]]:
    """Return the same where ``--pipeline-model-parallel-layout`` says which layer is where."""
    pipeline, text = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    parts = _write_out(text).split("|")
    if fault := _fault_of_layout("|".join(parts), len(parts), pipeline, args.num_layers, further):
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
    """Return a layout without commas and repetitions.

    Raises:
        ConfigError: it is longer than that of any model.
    """
    text = text.replace(",", "")
    for repeated in _REPEATED:
        sizes = (len(found[1]) * int(found[2][-_DIGITS:]) for found in repeated.finditer(text))
        longest = max(map(len, re.findall(r"\d+", text)), default=0)
        if longest > _DIGITS or len(text) + sum(sizes) > _MOST_LETTERS:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {text[:60]}: expected at most "
                f"{_MOST_LETTERS:,} letters, repeated ones counted, got more. Correct it."
            )
        text = repeated.sub(lambda found: found[1] * int(found[2]), text)
    return text


def _fault_of_layout(
    layout: str, parts: int, pipeline: int, num_layers: int, further: int
) -> str | None:
    """Return what Megatron refuses of a layout that is written out."""
    layers = layout.replace("|", "")
    if unknown := set(layers) - _KINDS.keys():
        known = ", ".join(f"{letter} ({kind})" for letter, kind in _KINDS.items())
        return f"{', '.join(sorted(unknown))} beside {known}"
    if parts % pipeline:
        return f"{parts} parts for --pipeline-model-parallel-size {pipeline}"
    wanted = {"E": 1, "t": num_layers, "m": further, "L": 1}
    for letter, number in wanted.items():
        if layers.count(letter) != number:
            return f"{letter} ({_KINDS[letter]}) {layers.count(letter)} times, not {number}"
    if not (layers.startswith("E") and layers.endswith("L")):
        return "an embedding (E) that is not first, or a loss (L) that is not last"
    if further and "t" in layers[layers.index("m") :]:
        return "a decoder layer (t) behind an MTP layer (m)"
    chunks = layout.split("|")
    with_further = [index for index, part in enumerate(chunks) if "m" in part]
    if len(with_further) > 1 or any(index < parts - pipeline for index in with_further):
        return "MTP layers (m) in several parts, or not in the last one of a stage"
    return None


def _moe_pattern(freq: int | list[int], num_layers: int) -> list[int]:
    """Return 1 for every layer with experts and 0 for every other, by ``--moe-layer-freq``."""
    if isinstance(freq, int):
        if freq < 1:
            raise ConfigError(f"--moe-layer-freq: expected 1 or more, got {freq}. Correct it.")
        return [int(layer % freq == 0) for layer in range(num_layers)]
    if len(freq) != num_layers:
        many = len(freq) > MOST_LAYERS
        raise ConfigError(
            f"--moe-layer-freq: expected a pattern of --num-layers {num_layers}, got "
            f"{f'more than {MOST_LAYERS:,}' if many else len(freq)} layers. Change one of the two."
        )
    if others := [mark for mark in freq if mark not in (0, 1)]:
        raise ConfigError(
            f"--moe-layer-freq: expected zeros and ones, got {others[0]}. Correct it."
        )
    if not any(freq):
        raise ConfigError("--moe-layer-freq: expected a layer with experts, got none. Correct it.")
    return list(freq)


def check_divides(whole: str, number: int, part: str, divisor: int) -> None:
    """Raise ConfigError unless ``divisor``, of the flag ``part``, divides ``number``."""
    if number % divisor:
        raise ConfigError(
            f"megatron_args: expected {part} to divide {whole} {number}, got {divisor}. Change one "
            "of the two."
        )
