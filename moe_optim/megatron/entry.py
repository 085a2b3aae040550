"""What training from the wheel needs besides the plug-in itself."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.training import get_args, training

from moe_optim.modules.grouped_weight import GroupedWeight

_stock_setup_model_and_optimizer = training.setup_model_and_optimizer


def compile_helpers() -> None:
    """Make sure the C++ dataset helper can be imported; the wheel ships it built."""
    importlib.import_module("megatron.core.datasets.helpers_cpp")


def setup_model_and_optimizer(
    model_type: Any,
    model_provider_func: Any = None,
    checkpointing_context: Any = None,
    *,
    cfg_container: Any = None,
    pg_collection: Any = None,
) -> tuple[Any, Any, Any]:
    """Build model, optimizer and scheduler as Megatron does, and describe them in a file.

    Rank 0 writes ``model.json`` next to the folder of TensorBoard events. Every rank must call it.
    """
    model, optimizer, scheduler = _stock_setup_model_and_optimizer(
        model_type,
        model_provider_func,
        checkpointing_context,
        cfg_container=cfg_container,
        pg_collection=pg_collection,
    )
    folder = get_args().tensorboard_dir
    description = describe(model, optimizer)
    if folder and torch.distributed.get_rank() == 0:
        path = Path(folder).parent / "model.json"
        path.write_text(json.dumps(description, indent=2) + "\n")
    return model, optimizer, scheduler


def describe(model: list[Any], optimizer: Any) -> dict[str, Any]:
    """Return what was built: optimizer class, storage format, and parameters of the whole model.

    Parameters are counted once over all ranks: experts over expert parallelism, all others as on
    one data-parallel rank. Every rank must call it.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    classes = sorted({type(part).__name__ for part in parts})
    dense = expert = quantized = 0
    formats = set()
    chunks = unwrap_model(model)
    for param in (param for chunk in chunks for param in chunk.parameters()):
        is_expert = not getattr(param, "allreduce", True)
        expert += param.numel() * is_expert
        dense += param.numel() * (not is_expert)
        if isinstance(param, GroupedWeight):
            quantized += param.numel()
            formats.add(param.quantized_storage.format.name)
    ep_size = chunks[0].config.expert_model_parallel_size
    return {
        "optimizer": ", ".join(classes),
        "format": ", ".join(sorted(formats)) or "bf16",
        "parameters": dense + expert * ep_size,
        "quantized_parameters": quantized * ep_size if expert else quantized,
    }
