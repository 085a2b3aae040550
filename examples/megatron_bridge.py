"""Switches the plug-in on in a configuration of Megatron-Bridge.

Call one of these on the ``ConfigContainer`` of your recipe, before Megatron-Bridge finalizes it:

    pretrain(train_with_moe_optim(config), forward_step)
"""

import dataclasses
from typing import Any

import moe_optim


def train_with_moe_optim(config: Any, **knobs: Any) -> Any:
    """Return ``config``, changed: the plug-in's optimizer trains what the recipe builds.

    Weights keep the format in which the recipe keeps them; bf16 where it has no native parameter
    gather.

    Args:
        config: a ``ConfigContainer``.
        knobs: of ``MoEOptimConfig``.
    """
    given = config.optimizer  # learning rate and all else stay
    fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
    config.optimizer = moe_optim.MoEOptimizerConfig(
        **fields, moe_optim=moe_optim.MoEOptimConfig(**knobs)
    )
    return config


def quantize_experts(config: Any, format: str = "mxfp8_2d") -> Any:
    """Return ``config``, changed: portable experts, their weights in ``format``, on any GPU.

    They are layers of the local spec, which needs no Transformer Engine, and multiply in bf16.

    Args:
        config: a ``ConfigContainer``.
        format: of the expert weights between two steps.
    """
    from megatron.bridge.models.gpt_provider import local_layer_spec

    config.model.moe_grouped_gemm = True
    config.model.transformer_layer_spec = local_layer_spec
    return train_with_moe_optim(config, format=format)
