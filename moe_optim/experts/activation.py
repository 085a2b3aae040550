"""The activation between the two linears of an expert, fused as in Megatron or unfused."""

from functools import partial
from typing import Any

import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_optim.library import as_written

_ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}


def activate(
    hidden: Tensor, biases: Tensor | None, probs: Tensor, config: TransformerConfig
) -> Tensor:
    """Apply activation and routing weights to fc1's output, fused or not as in Megatron's MLP.

    ``hidden`` and ``biases``, which are added first, are [T, 2F], ``probs`` are [T, 1].
    """
    store_fp8 = config.activation_func_fp8_input_store
    offset, clamp_value = config.glu_linear_offset, config.activation_func_clamp_value
    interleave_size = config.moe_mlp_glu_interleave_size  # which Megatron does not fuse
    name = "silu" if config.activation_func is F.silu else "quick_gelu"
    if config.bias_activation_fusion and interleave_size is None:
        return _fused_gate(hidden, biases, probs, name, store_fp8, offset, clamp_value)
    return _gate(hidden, biases, probs, name, offset, clamp_value, interleave_size)


def remove_interleaving(hidden: Tensor, size: int) -> Tensor:
    """Return [T, 2F] as gate and linear halves, given alternating blocks of ``size`` columns."""
    blocks = hidden.unflatten(-1, (-1, 2, size))  # [T, F / size, gate or linear, size]
    return blocks.transpose(-3, -2).flatten(-3)


def _empty_gated(hidden: Tensor, *_: Any) -> Tensor:
    tokens, features = hidden.shape
    return hidden.new_empty(tokens, features // 2)


@partial(as_written, fake=_empty_gated)
def _fused_gate(
    hidden: Tensor,
    biases: Tensor | None,
    probs: Tensor,
    activation: str,
    store_fp8: bool,
    linear_offset: float,
    clamp_value: float | None,
) -> Tensor:
    """Call a function that Megatron compiles; inlined elsewhere it might round differently."""
    if activation == "silu":
        return weighted_bias_swiglu_impl(hidden, biases, probs, store_fp8)
    return weighted_bias_quick_geglu_impl(
        hidden, biases, probs, store_fp8, linear_offset, clamp_value
    )


@partial(as_written, fake=_empty_gated)
def _gate(
    hidden: Tensor,
    biases: Tensor | None,
    probs: Tensor,
    activation: str,
    linear_offset: float,
    clamp_value: float | None,
    interleave_size: int | None,
) -> Tensor:
    """Return ``activation(gate) * (linear + linear_offset) * probs``.

    ``clamp_value`` bounds the gate from above and the linear half in magnitude; alternating blocks
    of both have ``interleave_size`` columns.
    """
    if biases is not None:
        hidden = hidden + biases
    if interleave_size is not None:
        hidden = remove_interleaving(hidden, interleave_size)
    gate, linear = hidden.chunk(2, dim=-1)
    if clamp_value is not None:
        gate = gate.clamp(max=clamp_value)
        linear = linear.clamp(min=-clamp_value, max=clamp_value)
    gated = _ACTIVATIONS[activation](gate) * (linear + linear_offset)
    return (gated * probs).to(gated.dtype)
