"""Carrying out an export: a layer of experts is read, quantized and written before the next."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from moe_optim.checkpoints.conversion.one_thread import one_thread
from moe_optim.checkpoints.files.publishing import published
from moe_optim.checkpoints.stores.reader import Recorded
from moe_optim.checkpoints.stores.safetensors_files import SafetensorsWriter
from moe_optim.export.engine_config import quantization_config
from moe_optim.export.files.export_plan import CONFIG, ExportPlan, folder_of

Report = Callable[[int], None]
"""Takes how many bytes have been read and written since the last call."""

_HEADER_BYTES = 512  # at most, of what a tensor has in headers and in the index
_TEXT_FILES = ("generation_config.json", "tokenizer*", "vocab.json", "merges.txt", "*.jinja")
"""Beside the weights of a model of Hugging Face, what engines read as well."""


def export_checkpoint(plan: ExportPlan, target: Path, report: Report = lambda _: None) -> None:
    """Carry out a plan; ``target`` appears when everything is written.

    It holds safetensors with their index, ``config.json`` with a ``quantization_config``, and what
    lies beside the weights for tokenizers. The largest part of memory is the experts of one layer,
    as they are stored and quantized.

    Raises:
        ConfigError: there is something at ``target`` already.
        StateError: a file of the source is damaged, or the disk is full.
    """
    tensors = sum(8 * one.stored.num_experts for one in plan.experts) + len(plan.dense)
    needed = plan.total_bytes + _HEADER_BYTES * tensors
    with one_thread(), published(target, needed_bytes=needed) as folder:
        writer = SafetensorsWriter(folder, Recorded(iteration=plan.view.recorded.iteration))
        unquantized: list[str] = []
        largest = 0
        for experts in plan.experts:
            nbytes = plan.experts_bytes(experts)
            largest = max(largest, nbytes)
            writer.write(plan.quantize(experts))
            report(nbytes)
        for keys in plan.dense_files(largest):
            dense = {key: plan.view.read(key) for key in keys}
            unquantized += filter(None, map(_linear_of, dense.items()))
            writer.write(dense)
            report(plan.view.nbytes(keys))
        writer.finish()
        _write_config(plan, folder, unquantized)
        _copy_texts(folder_of(plan.view.reader.path), folder)


def _linear_of(item: tuple[str, Tensor]) -> str | None:
    """Return the path of the linear that a tensor is the weight of, if it is one."""
    name, tensor = item
    is_linear = name.endswith(".weight") and tensor.dim() == 2 and "embed_tokens" not in name
    return name.removesuffix(".weight") if is_linear else None


def _write_config(plan: ExportPlan, folder: Path, unquantized: list[str]) -> None:
    made = quantization_config(plan.request.convention, sorted(unquantized))
    config = {**plan.config, "quantization_config": made}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _copy_texts(source: Path, folder: Path) -> None:
    for pattern in _TEXT_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
