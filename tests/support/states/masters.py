"""Whole masters put together from their shards, and the weights that have to come from them."""

from typing import Any

import torch
import torch.distributed as dist

from moe_optim.formats import reference
from moe_optim.weights.grouped_weight import GroupedWeight
from tests.support.bytes import assert_bytes_equal
from tests.support.training import named_parameters


def full_master(optimizer: Any, param: GroupedWeight) -> torch.Tensor:
    """Assemble the whole master of a parameter from the ranks that share it; each must call it."""
    for part in (part for part in optimizer.chained_optimizers if not part.is_stub_optimizer):
        for buffer in part.buffers:
            if param not in buffer.param_index_map:
                continue
            flat = torch.zeros(param.numel())
            if param in part.model_param_gbuf_map:
                owned = part._get_model_param_range_map(param)["param"]
                group, order = part.model_param_group_index_map[param]
                flat[owned.start : owned.end] = part.optimizer.param_groups[group]["params"][order]
            dist.all_reduce(flat, group=buffer.data_parallel_group)
            return flat.view(param.quantized_storage.shape)
    raise AssertionError("no optimizer owns the parameter")


def assert_weights_come_from_masters(model: list[Any], optimizer: Any) -> int:
    """Every buffer of every quantized weight is the oracle's of the assembled master.

    Returns how many weights of this rank were compared, over all model chunks.
    """
    for chunk in model:
        chunk.start_param_sync(force_sync=True)
    checked = 0
    for name, param in named_parameters(model):
        if isinstance(param, GroupedWeight):
            storage = param.quantized_storage
            expected = reference.quantize(full_master(optimizer, param), storage.format).buffers()
            for buffer, tensor in storage.quantized.buffers().items():
                assert_bytes_equal(tensor, expected[buffer], what=f"{name} {buffer}")
            checked += 1
    return checked
