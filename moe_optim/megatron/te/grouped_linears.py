"""Grouped linears of Transformer Engine in a model, and the experts in one tensor of theirs."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moe_optim.megatron.te.fields import is_grouped


def grouped_linears(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every grouped linear below a module with its name, told as Megatron tells them."""
    for name, linear in module.named_modules():
        if hasattr(linear, "num_gemms") and hasattr(linear, "_split_grouped_checkpoint_tensor"):
            yield name, linear


def members_of(tensor: Any) -> Sequence[Any]:
    """Return the tensor of each expert in one of all experts, a ``GroupedTensor`` or any other."""
    if is_grouped(tensor):
        return tensor.quantized_tensors or tensor.split_into_quantized_tensors()
    return tensor.unbind(0)
