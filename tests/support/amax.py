"""What the amaxes of experts have to be, and where they are found."""

import torch

from moe_optim.modules.grouped_linear import GroupedLinear


def amax_of(masters: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each expert [E, R, C] rounded to bf16, in plain torch."""
    magnitudes = masters.bfloat16().float().abs()
    return torch.where(magnitudes.isnan(), 0, magnitudes).amax((1, 2))


def linears_of(module: torch.nn.Module) -> dict[str, GroupedLinear]:
    """Return every grouped linear of a module by name."""
    named = module.named_modules()
    return {name: linear for name, linear in named if isinstance(linear, GroupedLinear)}
