"""Converts a published quantized checkpoint to the same model in bf16."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optim.checkpoint.files.publishing import published
from moe_optim.checkpoint.files.reader import CheckpointReader
from moe_optim.commands.conversion.file_plan import (
    BLOB_BYTES,
    BytesDone,
    FilePlan,
    Part,
    one_thread,
    write_safetensors,
)
from moe_optim.commands.conversion.layer_view import LayerView
from moe_optim.commands.conversion.model_sources import (
    CONFIG,
    dequantized,
    folder_of,
    read_config,
    read_given_tokenizer,
    require_format,
    special_tokens,
    unquantized_config,
)

_FILE_BYTES = 2**32


@dataclass(frozen=True, kw_only=True)
class DequantizationPlan(FilePlan):
    """Every tensor as it is, except for quantized weights, which become bf16."""

    config: Mapping[str, Any]
    """``config.json`` without ``quantization_config``."""
    tokenizer: Path | None
    """Folder of tokenizer files to copy; None: that of the source, if it has any."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of a file, an upper bound of the memory used."""
        return max(_FILE_BYTES, *map(self.part_bytes, self.parts))

    def files(self) -> Iterator[list[Part]]:
        """Yield the tensors of each file, in the order of the source."""
        return self.grouped(self.parts)


def plan_dequantization(
    reader: CheckpointReader, tokenizer: Path | None = None
) -> DequantizationPlan:
    """Return the plan without reading tensor values.

    Raises:
        ConfigError: ``config.json`` declares no quantization, or one that is unknown.
        LayoutError: elements or scales are missing, superfluous, or of wrong shapes or dtypes.
    """
    shown = dequantized(reader)
    if shown is reader:
        require_format(reader, "hf")
    view = LayerView(shown)
    return DequantizationPlan(
        view=view,
        parts=tuple(Part(sources=(key,)) for key in view.tensors),
        source_interleave=0,
        config=unquantized_config(read_config(folder_of(reader))),
        tokenizer=tokenizer,
    )


def dequantize_checkpoint(
    plan: DequantizationPlan, target: Path, report: BytesDone = lambda _: None
) -> None:
    """Execute a plan; ``target`` appears when everything is written.

    Writes safetensors, ``config.json`` and tokenizer files.

    Raises:
        ConfigError: ``target`` exists, or the tokenizer folder contains no tokenizer.
        StateError: a file of the source or of the tokenizer is damaged, or the disk is full.
    """
    texts = read_given_tokenizer(plan.tokenizer, folder_of(plan.view.reader))
    tokens = special_tokens(plan.tokenizer)
    said = {name: one for name, one in tokens.items() if one is not None}
    needed = plan.total_bytes + BLOB_BYTES * len(plan.parts) + sum(map(len, texts.values()))
    with one_thread(), published(target, needed_bytes=needed) as folder:
        write_safetensors(plan, folder, plan.view.recorded, report)
        for name, content in texts.items():
            (folder / name).write_bytes(content)
        config = {**plan.config, **said}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
