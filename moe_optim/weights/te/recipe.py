"""Recipes of Transformer Engine: which one weights are kept in, and square blocks for MXFP8."""

import os
from dataclasses import replace
from typing import Any

from moe_optim.integration.patching.active import installed_config
from moe_optim.integration.patching.engine import original
from moe_optim.weights.te.quantizer import require_square_blocks

_OTHER_BYTES: dict[
    str, dict[str, tuple[str, ...]]
] = {  # by recipe: variables that Transformer Engine reads, values that are refused
    "--fp8-recipe blockwise": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("1",)},
    "--fp4-recipe nvfp4": {
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("1",),
        "NVTE_NVFP4_4OVER6": ("weights", "all"),
    },
}


def get_fp8_recipe(config: Any) -> Any:
    """Return Megatron's recipe; with ``format: mxfp8_2d`` weights get blocks of 32 x 32.

    Args:
        config: Megatron's transformer configuration. Recipes other than ``--fp8-recipe mxfp8`` are
            returned as they are.

    Raises:
        ConfigError: Transformer Engine is too old to have square blocks in MXFP8.
    """
    recipe = original("megatron.core.fp8_utils:get_fp8_recipe")(config)
    wanted = installed_config()
    if wanted is None or wanted.format != "mxfp8_2d" or not getattr(recipe, "mxfp8", bool)():
        return recipe
    require_square_blocks(hasattr(recipe, "enable_2d_quantization"))
    return replace(recipe, enable_2d_quantization=True)


def native_recipe(model: Any) -> str | None:
    """Return the flag of the recipe that weights are kept in between steps, None for bf16."""
    for on, kept, name in (("fp8", "fp8_param", "fp8_recipe"), ("fp4", "fp4_param", "fp4_recipe")):
        if getattr(model, on) and getattr(model, kept):
            recipe = getattr(model, name)
            return f"--{name.replace('_', '-')} {getattr(recipe, 'value', recipe)}"
    return None


def variables_of_other_bytes(recipe: str) -> list[str]:
    """Return what the environment sets so that a recipe makes weights in no format of ours.

    Args:
        recipe: its flag, see :func:`native_recipe`.
    """
    return [
        f"{variable}={os.environ[variable]}"
        for variable, values in _OTHER_BYTES.get(recipe, {}).items()
        if os.environ.get(variable) in values
    ]
