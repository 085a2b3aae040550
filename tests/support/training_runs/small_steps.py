"""Steps of a small model in a loop of a test's own, without Megatron's training loop."""

from typing import Any

import torch

from tests.support.training import weight_bytes


def take_step(chunk: Any, optimizer: Any, number: int) -> float:
    """Take a step on tokens that differ by step and rank; return the norm of the gradients."""
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    seeded = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
    tokens = torch.randint(0, 63, (1, 32), generator=seeded)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    chunk(tokens, torch.arange(32)[None], mask).float().square().mean().backward()
    chunk.finish_grad_sync()
    _, norm, _ = optimizer.step()
    return float(norm)


def weights_of(chunk: Any) -> dict[str, torch.Tensor]:
    """Return copies of the buffers of all quantized weights, and of the values of the others."""
    weights = {}
    for name, param in chunk.named_parameters():
        weights |= weight_bytes(name, param)
    return weights
