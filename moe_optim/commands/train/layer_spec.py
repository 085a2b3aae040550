"""Megatron's layer spec of a GPT, with a norm that supports sequence parallelism."""

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec


class SequenceParallelNorm:
    """torch's LayerNorm or RMSNorm, applied to the rank's part of the sequence.

    Megatron's local layers use apex's fused norm, or torch's if apex is missing; it refuses
    sequence parallelism with the latter, assuming that weight gradients are not summed. Megatron
    does sum them for every parameter marked ``sequence_parallel``, as these are.
    """

    def __new__(cls, config: Any, hidden_size: int, **kwargs: Any) -> Any:
        """Build the norm; arguments are those of ``WrappedTorchNorm``, which it replaces."""
        without = copy.copy(config)
        without.sequence_parallel = False
        norm: torch.nn.Module = WrappedTorchNorm(without, hidden_size, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = True  # type: ignore[attr-defined]
        return norm


def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Return the layer spec of one pipeline stage.

    ``vp_stage`` is the index of the model chunk on this pipeline rank; None for a single chunk.
    """
    spec = default_layer_spec(config, vp_stage)
    if config.transformer.sequence_parallel:
        _replace(spec, WrappedTorchNorm, SequenceParallelNorm)
    return spec


def _replace(spec: Any, old: type, new: type) -> None:
    for name, value in [(field.name, getattr(spec, field.name)) for field in fields(spec)]:
        if value is old:
            setattr(spec, name, new)
        for part in value if isinstance(value, list) else [value]:
            if is_dataclass(part) and not isinstance(part, type):
                _replace(part, old, new)
