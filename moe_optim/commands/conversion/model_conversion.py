"""Writes whole models, for transformers and for Megatron."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import Recorded
from moe_optim.checkpoint.files.torch_dist import INTERLEAVE_ARG, OWN_ARGUMENTS
from moe_optim.commands.conversion.file_plan import (
    BytesDone,
    FileJob,
    FilePlan,
    one_thread,
    saved,
    torch_dist_checkpoint,
    write_common_state,
    write_safetensors,
    write_torch_dist,
)
from moe_optim.commands.conversion.model_plan import ModelPlan
from moe_optim.commands.conversion.model_sources import (
    CONFIG,
    folder_of,
    read_config,
    read_tokenizer,
    special_tokens,
    unquantized_config,
)
from moe_optim.rollout.families import LAYOUT_OF_EXPERTS


def convert_model(
    plan: ModelPlan, target: Path, report: BytesDone = lambda _: None, *, workers: int = 1
) -> None:
    """Execute a plan; ``target`` appears when everything is written.

    For transformers, writes safetensors, ``config.json`` and tokenizer files; for Megatron's
    ``--load``, a folder ``release`` with weights only, and the tracker file.

    Raises:
        ConfigError: ``target`` exists, or the tokenizer folder contains no tokenizer.
        StateError: a file of the source or of the tokenizer is damaged, or the disk is full.
    """
    if plan.request.to == "megatron":
        with one_thread(), published(target, needed_bytes=plan.disk_bytes) as folder:
            _write_megatron(plan, folder, report, workers)
        return
    tokenizer = plan.request.tokenizer
    texts = {} if tokenizer is None else read_tokenizer(tokenizer, beside=tokenizer)
    recorded = Recorded(
        layout=LAYOUT_OF_EXPERTS,
        glu_interleave=0,
        num_experts=plan.model.num_experts,
        iteration=plan.view.recorded.iteration,
    )
    dtype = str(plan.view.tensors[plan.parts[0].sources[0]].dtype).removeprefix("torch.")
    config = {**plan.model.config, **special_tokens(tokenizer), "torch_dtype": dtype}
    write_hf(plan, target, recorded, config, texts, report, workers)


def dequantize_checkpoint(
    plan: FilePlan,
    target: Path,
    tokenizer: Path | None = None,
    report: BytesDone = lambda _: None,
    *,
    workers: int = 1,
) -> None:
    """Execute a plan; ``target`` appears when everything is written.

    Writes safetensors, ``config.json`` and tokenizer files. ``tokenizer`` None means that of the
    source, if it has any.

    Raises:
        ConfigError: ``target`` exists, or the tokenizer folder contains no tokenizer.
        StateError: a file of the source or of the tokenizer is damaged, or the disk is full.
    """
    folder = folder_of(plan.view.reader)
    texts = read_tokenizer(tokenizer, beside=folder)
    said = {name: one for name, one in special_tokens(tokenizer).items() if one is not None}
    config = {**unquantized_config(read_config(folder)), **said}
    write_hf(plan, target, plan.view.recorded, config, texts, report, workers)


def write_hf(
    plan: FilePlan,
    target: Path,
    recorded: Recorded,
    config: Mapping[str, Any],
    texts: Mapping[str, bytes],
    report: BytesDone,
    workers: int,
) -> None:
    """Write safetensors, ``config.json`` and tokenizer files; ``target`` appears at the end."""
    needed = plan.disk_bytes + sum(map(len, texts.values()))
    with one_thread(), published(target, needed_bytes=needed) as folder:
        write_safetensors(plan, folder, recorded, report, workers)
        for name, content in texts.items():
            (folder / name).write_bytes(content)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _write_megatron(plan: ModelPlan, folder: Path, report: BytesDone, workers: int) -> None:
    with torch_dist_checkpoint(folder, None) as (into, writer):
        arguments = dict(plan.model.arguments)
        own = {INTERLEAVE_ARG: plan.request.glu_interleave, OWN_ARGUMENTS: arguments}
        write_common_state(writer, 0, own)
        extra_states: dict[str, None] = {}
        for part in plan.parts:
            experts = part.experts.num_experts if part.experts else 0
            for name in plan.tensors(part) if experts else part.targets:
                place, layers = plan.place_of(part, name)
                of_layer = None if place.layer is None else (place.layer, layers)
                extra_states |= dict.fromkeys(_extra_states(place.name, of_layer, experts))
        for key in extra_states:
            writer.write_object(key, saved(None))
        jobs = [FileJob(number=n, parts=parts) for n, parts in enumerate(plan.files, 1)]
        write_torch_dist(plan, into, writer, jobs, report, workers)
        writer.finish()


def _extra_states(stored: str, layers: tuple[int, int] | None, experts: int) -> Iterator[str]:
    """Yield the keys of the ``_extra_state`` objects that may accompany a stored tensor.

    Megatron's linears and Transformer Engine's modules save one each, with the scales of delayed
    FP8 or empty. A strict load fails if one is missing and ignores extra ones, so every module that
    may have one gets an empty one. ``layers`` is the layer number and the number of layers.
    """
    if stored.startswith(("embedding.", "output_layer.")) or ".mlp.router." in stored:
        return
    module, _, tail = stored.rpartition(".")
    modules = [module] if tail in ("weight", "layer_norm_weight") else []
    if module.endswith("self_attention.linear_proj"):
        modules.append(f"{module.removesuffix('linear_proj')}core_attention")
    for name in modules:
        for expert in range(experts) if experts else [None]:
            place = [layers] if layers else []
            place += [] if expert is None else [(expert, experts)]
            offset = ".".join(str(number) for number, _ in place) or "0"
            shape = ".".join(str(count) for _, count in place) or "1"
            yield f"{name}._extra_state/shard_{offset}_{shape}"
