"""Trains recipes of Megatron-Bridge: pretrain(train_with_moe_optim(config), forward_step)."""

import dataclasses
from functools import partial
from typing import Any

import moe_optim


def train_with_moe_optim(config: Any, **knobs: Any) -> Any:
    """Return the ``ConfigContainer``, changed to our optimizer; knobs are of ``MoEOptimConfig``.

    Weights keep the recipe's format: bf16 if it has no native parameter gather.
    """
    given = config.optimizer  # keeps the learning rate and all other fields
    fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
    config.optimizer = moe_optim.MoEOptimizerConfig(
        **fields, moe_optim=moe_optim.MoEOptimConfig(**knobs)
    )
    return config


def quantize_experts(config: Any, format: str = "mxfp8_2d") -> Any:
    """Return ``config``, changed to experts in ``format``, without Transformer Engine's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if config.model.multi_latent_attention:
        raise ValueError(
            "quantize_experts: expected attention of Megatron's local spec, got multi-latent "
            "attention, which it lacks. Call train_with_moe_optim, and give mixed_precision native "
            "parameter gather to quantize weights."
        )
    config.model.moe_grouped_gemm = True
    norm = config.model.normalization
    config.model.transformer_layer_spec = partial(
        get_gpt_decoder_block_spec, use_transformer_engine=False, normalization=norm
    )
    return train_with_moe_optim(config, format=format, expert_layout="indexed")  # for converters
