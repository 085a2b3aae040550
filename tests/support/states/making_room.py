"""What RL stacks do to a model and its optimizer while a rollout needs their memory."""

from typing import Any

import torch
from torch import Tensor


def all_buffers(model: list[Any]) -> list[Any]:
    """Return the buffers of all weights."""
    return [b for chunk in model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def managed_buffers(model: list[Any]) -> list[Any]:
    """Return the buffers of quantized weights."""
    return [buffer for buffer in all_buffers(model) if buffer.managed]


def list_masters(optimizer: Any) -> list[Tensor]:
    """Return the masters of this rank."""
    return [
        master
        for part in optimizer.chained_optimizers
        for group in part.shard_fp32_from_float16_groups
        for master in group
    ]


def send_weights_away(model: list[Any]) -> None:
    """Send weights to the host by Megatron's call; gradients stay."""
    for buffer in all_buffers(model):
        buffer.offload_to_cpu(move_grads=False)


def send_away_as_verl(model: list[Any]) -> None:
    """Send weights and gradients to the host by what verl calls for it: storages of tensors."""
    for buffer in all_buffers(model):
        weights = buffer.param_data
        if weights.storage().size() > 0:
            kept = getattr(weights, "cpu_data", None)
            if kept is None:
                weights.cpu_data = torch.empty(weights.size(), dtype=weights.dtype, device="cpu")
                buffer.param_data_size = weights.storage().size()
            else:
                assert (kept.shape, kept.dtype) == (weights.shape, weights.dtype)
            weights.cpu_data.copy_(weights.data, non_blocking=False)
            weights.storage().resize_(0)
        assert buffer.param_data_size == weights.cpu_data.storage().size()
    send_gradients_away_as_verl(model)


def send_gradients_away_as_verl(model: list[Any]) -> None:
    """Free the memory of gradients without a word."""
    for buffer in all_buffers(model):
        gradients = buffer.grad_data
        if gradients.storage().size() > 0:
            buffer.grad_data_size = gradients.storage().size()
            gradients.storage().resize_(0)


def bring_back_as_verl(model: list[Any]) -> None:
    """Bring back what :func:`send_away_as_verl` has sent; gradients are zeros."""
    bring_gradients_back_as_verl(model)
    for buffer in all_buffers(model):
        weights = buffer.param_data
        if weights.storage().size() == 0:
            weights.storage().resize_(buffer.param_data_size)
            weights.copy_(weights.cpu_data, non_blocking=True)


def bring_gradients_back_as_verl(model: list[Any]) -> None:
    """Have memory for gradients again, full of zeros."""
    for buffer in all_buffers(model):
        buffer.grad_data.storage().resize_(buffer.grad_data_size)
        buffer.grad_data.zero_()


def send_states_away_as_verl(optimizer: Any) -> None:
    """Send masters and moments to the host by what verl calls for it: ``to`` of each tensor."""
    _move_states(optimizer, "cpu")


def bring_states_back_as_verl(optimizer: Any) -> None:
    """Bring masters and moments back, to memory of the GPU wherever they were before."""
    _move_states(optimizer, torch.device("cuda", torch.cuda.current_device()))


def _move_states(optimizer: Any, device: Any) -> None:
    for part in optimizer.chained_optimizers:
        for group in part.shard_fp32_from_float16_groups:
            for master in group:
                master.data = master.data.to(device, non_blocking=True)
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].to(device, non_blocking=True)


def move_masters(optimizer: Any) -> None:
    """Give masters other memory with the same values, as verl does: by their ``data``."""
    for master in list_masters(optimizer):
        master.data = master.data.clone()


def offload_and_reload(model: list[Any], optimizer: Any, *, move_grads: bool = True) -> None:
    """Have everything away at once, then back, the masters elsewhere."""
    buffers = all_buffers(model)
    for buffer in buffers:
        buffer.offload_to_cpu(move_grads=move_grads)
    move_masters(optimizer)
    for buffer in buffers:
        buffer.reload_from_cpu(move_grads=move_grads)
