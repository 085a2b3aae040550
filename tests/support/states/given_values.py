"""Values that tests give the weights of a model, other than those it was initialised with."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch


def draw_values(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the values of a parameter, the same in every process: bf16, on the host."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator).mul(0.1).bfloat16()


def draw_all(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return values for every parameter, by its name."""
    return {name: draw_values(name, param.shape) for name, param in model.named_parameters()}


def load(model: torch.nn.Module) -> None:
    """Load all drawn values."""
    model.load_state_dict(draw_all(model), strict=False)


def when_built(do: Callable[[Any], None], *, initialize: bool = True) -> None:
    """Have ``do`` called with every GPT of this process, before anything wraps it.

    Args:
        do: called with the model.
        initialize: whether its weights are drawn, or left to whoever loads them.
    """
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    def build_and_do(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config.perform_initialization = initialize
        build(model, config, *args, **kwargs)
        do(model)

    GPTModel.__init__ = build_and_do
