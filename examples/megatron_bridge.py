"""Enables the plug-in in a configuration of Megatron-Bridge.

Call one of these on the ``ConfigContainer`` of your recipe, before Megatron-Bridge finalizes it:

    pretrain(train_with_moe_optim(config), forward_step)
"""

import dataclasses
from functools import partial
from typing import Any

import moe_optim


def train_with_moe_optim(config: Any, **knobs: Any) -> Any:
    """Return ``config``, modified to train with the plug-in's optimizer.

    Weights keep the recipe's format: bf16 if it has no native parameter gather.

    Args:
        config: ``ConfigContainer`` of a recipe.
        knobs: fields of ``MoEOptimConfig``.
    """
    given = config.optimizer  # keeps the learning rate and all other fields
    fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
    config.optimizer = moe_optim.MoEOptimizerConfig(
        **fields, moe_optim=moe_optim.MoEOptimConfig(**knobs)
    )
    return config


def quantize_experts(config: Any, format: str = "mxfp8_2d") -> Any:
    """Return ``config``, modified to use portable experts with weights in ``format``, on any GPU.

    The experts are layers of the local spec, which needs no Transformer Engine; GEMMs run in bf16.
    Each has a weight of its own, as Megatron-Bridge's converters expect.

    Args:
        config: ``ConfigContainer`` of a recipe.
        format: format of the expert weights between steps.

    Raises:
        ValueError: the model has multi-latent attention, as DeepSeek-V3 and Kimi-K2 have.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if config.model.multi_latent_attention:
        raise ValueError(
            "quantize_experts: expected attention of Megatron's local spec, got multi-latent "
            "attention, which it lacks. Call train_with_moe_optim, and give mixed_precision native "
            "parameter gather to quantize weights."
        )
    config.model.moe_grouped_gemm = True
    config.model.transformer_layer_spec = partial(
        get_gpt_decoder_block_spec,
        use_transformer_engine=False,
        normalization=config.model.normalization,
    )
    return train_with_moe_optim(config, format=format, expert_layout="indexed")
