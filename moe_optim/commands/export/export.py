"""Executes an export one layer of experts at a time."""

import json
from pathlib import Path
from typing import Any

from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import Recorded
from moe_optim.commands.conversion.file_plan import BytesDone, one_thread, write_safetensors
from moe_optim.commands.conversion.model_sources import (
    CONFIG,
    folder_of,
    read_given_tokenizer,
    special_tokens,
)
from moe_optim.commands.export.engine_config import quantization_config
from moe_optim.commands.export.export_plan import ExportPlan

_HEADER_BYTES = 512  # upper bound per tensor in headers and index


def export_checkpoint(plan: ExportPlan, target: Path, report: BytesDone = lambda _: None) -> None:
    """Execute a plan; ``target`` appears when everything is written.

    Writes safetensors with an index, ``config.json`` with a ``quantization_config``, and tokenizer
    files if there are any. Peak memory is the experts of one layer, stored and quantized.

    Raises:
        ConfigError: ``target`` exists, or the tokenizer folder contains no tokenizer.
        StateError: a file of the source or of the tokenizer is damaged, or the disk is full.
    """
    tensors = sum(8 * one.experts.num_experts for one in plan.experts if one.experts is not None)
    texts = read_given_tokenizer(plan.request.tokenizer, folder_of(plan.view.reader))
    tokens = special_tokens(plan.request.tokenizer)
    headers = _HEADER_BYTES * (tensors + len(plan.others))
    needed = plan.total_bytes + headers + sum(map(len, texts.values()))
    with one_thread(), published(target, needed_bytes=needed) as folder:
        write_safetensors(plan, folder, Recorded(iteration=plan.view.recorded.iteration), report)
        for name, content in texts.items():
            (folder / name).write_bytes(content)
        said = {name: one for name, one in tokens.items() if one is not None}
        config: dict[str, Any] = {**tokens, **plan.config, **said}
        config["quantization_config"] = quantization_config(
            plan.request.convention, plan.unquantized
        )
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
