"""Switches the plug-in on in a configuration of Megatron-Bridge.

Call it on the ``ConfigContainer`` of your recipe:

    pretrain(quantize_experts(config), forward_step)
"""

import dataclasses
from typing import Any

import moe_optim


def quantize_experts(config: Any, format: str = "mxfp8") -> Any:
    """Return ``config``, changed: expert weights in ``format``, trained by the plug-in.

    Args:
        config: a ``ConfigContainer``, which Megatron-Bridge has not finalized yet.
        format: of the expert weights between two steps.
    """
    from megatron.bridge.models.gpt_provider import local_layer_spec

    knobs = moe_optim.MoEOptimConfig(format=format)
    given = config.optimizer  # learning rate and all else stay
    fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
    config.optimizer = moe_optim.MoEOptimizerConfig(**fields, moe_optim=knobs)
    config.model.moe_grouped_gemm = True
    config.model.transformer_layer_spec = local_layer_spec
    return config
