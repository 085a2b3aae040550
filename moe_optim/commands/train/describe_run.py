"""Writes ``model.json``, a description of the model and optimizer of a run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model
from megatron.training import get_args

from moe_optim.commands.console.provenance import describe_environment
from moe_optim.integration.agreement import gather_objects
from moe_optim.integration.engine import original
from moe_optim.integration.script_runner import trains_on_cpu
from moe_optim.optimizer.description import describe
from moe_optim.weights.managed import is_managed
from moe_optim.weights.te.fields import TENSORWISE, is_tensorwise


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
    stock = original("megatron.training.training:setup_model_and_optimizer")
    model, optimizer, scheduler = stock(
        model_type,
        model_provider_func,
        checkpointing_context,
        cfg_container=cfg_container,
        pg_collection=pg_collection,
    )
    folder = get_args().tensorboard_dir
    description = describe_model(model, optimizer)
    if folder and dist.get_rank() == 0:
        description["rank0"] = asdict(describe(model, optimizer))
        description["environment"] = describe_environment(
            on_gpu=not trains_on_cpu(), ranks=dist.get_world_size()
        )
        path = Path(folder).parent / "model.json"
        path.write_text(json.dumps(description, indent=2) + "\n")
    return model, optimizer, scheduler


def describe_model(model: list[Any], optimizer: Any) -> dict[str, Any]:
    """Return optimizer class, storage format, and parameters of the whole model.

    Replicated parameters count once. Every rank must call it.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    classes = {type(part).__name__ for part in parts}
    formats = set()
    count = quantized = 0
    for param in (param for chunk in unwrap_model(model) for param in chunk.parameters()):
        counted = param.numel() * _is_counted_here(param)
        count += counted
        if is_managed(param):
            quantized += counted
            formats.add(param.quantized_storage.format.name)
        elif is_tensorwise(param):
            quantized += counted
            formats.add(TENSORWISE)
    ranks = gather_objects((classes, formats, count, quantized), None)
    all_classes, all_formats, counts, quantized_counts = zip(*ranks, strict=True)
    return {
        "optimizer": ", ".join(sorted(set().union(*all_classes))),
        "format": ", ".join(sorted(set().union(*all_formats))) or "bf16",
        "parameters": sum(counts),
        "quantized_parameters": sum(quantized_counts),
    }


def _is_counted_here(param: torch.nn.Parameter) -> bool:
    if getattr(param, "allreduce", True):
        copy = mpu.get_data_parallel_rank(with_context_parallel=True)
    else:  # copies of experts are on other ranks
        copy = mpu.get_expert_data_parallel_rank()
    is_first_copy = copy == 0 and param_is_not_tensor_parallel_duplicate(
        param, mpu.get_tensor_model_parallel_group(), mpu.get_expert_tensor_parallel_group()
    )
    return is_first_copy and param_is_not_shared(param)
