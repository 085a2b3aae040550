"""What RL stacks do to a model and its optimizer while a rollout needs their memory."""

from typing import Any

from torch import Tensor


def managed_buffers(model: list[Any]) -> list[Any]:
    """Return the buffers of quantized weights."""
    buffers = (b for chunk in model for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
    return [buffer for buffer in buffers if buffer.managed]


def list_masters(optimizer: Any) -> list[Tensor]:
    """Return the masters of this rank."""
    return [
        master
        for part in optimizer.chained_optimizers
        for group in part.shard_fp32_from_float16_groups
        for master in group
    ]


def move_masters(optimizer: Any) -> None:
    """Give masters other memory with the same values, as verl does: by their ``data``."""
    for master in list_masters(optimizer):
        master.data = master.data.clone()


def offload_and_reload(model: list[Any], optimizer: Any, *, move_grads: bool = True) -> None:
    """Have everything away at once, then back, the masters elsewhere."""
    for buffer in managed_buffers(model):
        buffer.offload_to_cpu(move_grads=move_grads)
    move_masters(optimizer)
    for buffer in managed_buffers(model):
        buffer.reload_from_cpu(move_grads=move_grads)
