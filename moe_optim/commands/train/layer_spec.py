"""The layers a GPT is built from: Megatron's own choice, with a norm for sequence parallelism."""

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec


class SequenceParallelNorm:
    """torch's LayerNorm or RMSNorm, each tensor-parallel rank for its part of the sequence.

    Megatron's local layers take apex's fused norm, and torch's where there is no apex; it refuses
    sequence parallelism for the latter because nobody sums the weight gradients. Megatron sums them
    for every parameter marked ``sequence_parallel``, as these are.
    """

    def __new__(cls, config: Any, hidden_size: int, **kwargs: Any) -> Any:
        """Build the norm; arguments are those of ``WrappedTorchNorm``, which it stands for."""
        without = copy.copy(config)
        without.sequence_parallel = False
        norm: torch.nn.Module = WrappedTorchNorm(without, hidden_size, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = True  # type: ignore[attr-defined]
        return norm


def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Return what one stage of the model is built from.

    ``vp_stage`` is the index of the model chunk on this pipeline rank; None if it has one.
    """
    spec = default_layer_spec(config, vp_stage)
    if config.transformer.sequence_parallel:
        _replace(spec, WrappedTorchNorm, SequenceParallelNorm)
    return spec


def _replace(spec: Any, old: type, new: type) -> None:
    """Put ``new`` wherever a specification, or one below it, names ``old``."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value is old:
            setattr(spec, field.name, new)
        for part in value if isinstance(value, list) else [value]:
            if is_dataclass(part) and not isinstance(part, type):
                _replace(part, old, new)
