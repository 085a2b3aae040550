"""Megatron's own Muon on gloo, which gathers parts of equal sizes only."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_uneven_parts() -> None:
    """Let ``torch.distributed.all_gather`` gather parts of several sizes in this process.

    Megatron's layer-wise optimizer gathers whole matrices, of which ranks own different numbers.
    """
    stock = dist.all_gather

    def all_gather(
        tensors: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        numel = max(one.numel() for one in tensors)
        padded = [tensor.new_zeros(numel) for _ in tensors]
        stock(padded, torch.nn.functional.pad(tensor.view(-1), (0, numel - tensor.numel())), group)
        for one, whole in zip(tensors, padded, strict=True):
            one.copy_(whole[: one.numel()].view_as(one))
        return _Done() if async_op else None

    dist.all_gather = all_gather


class _Done:
    def wait(self) -> None:
        pass
