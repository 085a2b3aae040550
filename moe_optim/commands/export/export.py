"""Carrying out an export: a layer of experts is read, quantized and written before the next."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import Recorded
from moe_optim.commands.conversion.model_sources import (
    CONFIG,
    folder_of,
    read_tokenizer,
    special_tokens,
)
from moe_optim.commands.conversion.one_thread import one_thread
from moe_optim.commands.conversion.safetensors_files import SafetensorsWriter
from moe_optim.commands.export.engine_config import quantization_config
from moe_optim.commands.export.export_plan import ExportPlan
from moe_optim.errors import ConfigError

Report = Callable[[int], None]
"""Takes how many bytes have been read and written since the last call."""

_HEADER_BYTES = 512  # at most, of what a tensor has in headers and in the index


def export_checkpoint(plan: ExportPlan, target: Path, report: Report = lambda _: None) -> None:
    """Carry out a plan; ``target`` appears when everything is written.

    It holds safetensors with their index, ``config.json`` with a ``quantization_config``, and files
    of a tokenizer where there are some. At most the experts of one layer are in memory, as they are
    stored and quantized.

    Raises:
        ConfigError: there is something at ``target`` already, or no tokenizer where one was named.
        StateError: a file of the source or of the tokenizer is damaged, or the disk is full.
    """
    tensors = sum(8 * one.stored.num_experts for one in plan.experts) + len(plan.dense)
    texts, tokens = _read_tokenizer(plan), special_tokens(plan.request.tokenizer)
    needed = plan.total_bytes + _HEADER_BYTES * tensors + sum(map(len, texts.values()))
    with one_thread(), published(target, needed_bytes=needed) as folder:
        unquantized = _write_weights(plan, folder, report)
        for name, content in texts.items():
            (folder / name).write_bytes(content)
        _write_config(plan, folder, tokens, unquantized)


def _write_weights(plan: ExportPlan, folder: Path, report: Report) -> list[str]:
    """Write all tensors; return the paths of linears that are not quantized."""
    writer = SafetensorsWriter(folder, Recorded(iteration=plan.view.recorded.iteration))
    unquantized: list[str] = []
    for experts in plan.experts:
        writer.write(plan.quantize(experts))
        report(plan.experts_bytes(experts))
    for group in plan.dense_files(max(map(plan.experts_bytes, plan.experts))):
        dense = {name: one for part in group for name, one in plan.read_dense(part).items()}
        unquantized += [name for item in dense.items() if (name := _linear_of(*item))]
        writer.write(dense)
        report(sum(plan.view.nbytes(part.sources) for part in group))
    writer.finish()
    return unquantized


def _linear_of(name: str, tensor: Tensor) -> str | None:
    """Return the path of the linear that a tensor is the weight of, if it is one."""
    is_linear = name.endswith(".weight") and tensor.dim() == 2 and "embed_tokens" not in name
    return name.removesuffix(".weight") if is_linear else None


def _read_tokenizer(plan: ExportPlan) -> dict[str, bytes]:
    """Return the files of the tokenizer that was named, or that lies beside the weights."""
    try:
        return read_tokenizer(plan.request.tokenizer or folder_of(plan.view.reader))
    except ConfigError:
        if plan.request.tokenizer:
            raise
        return {}


def _write_config(
    plan: ExportPlan, folder: Path, tokens: Mapping[str, object], unquantized: list[str]
) -> None:
    said = {name: one for name, one in tokens.items() if one is not None}
    config: dict[str, Any] = {**tokens, **plan.config, **said}
    config["quantization_config"] = quantization_config(
        plan.request.convention, sorted(unquantized)
    )
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
