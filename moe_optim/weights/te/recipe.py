"""The recipe of Transformer Engine that quantizes MXFP8 in square blocks."""

from dataclasses import replace
from typing import Any

from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config
from moe_optim.weights.te.quantizer import require_square_blocks


def get_fp8_recipe(config: Any) -> Any:
    """Return Megatron's recipe; with ``format: mxfp8_2d`` weights get blocks of 32 x 32.

    Args:
        config: Megatron's transformer configuration. Recipes other than ``--fp8-recipe mxfp8`` are
            returned as they are.

    Raises:
        ConfigError: Transformer Engine is too old to have square blocks in MXFP8.
    """
    recipe = original("megatron.core.fp8_utils:get_fp8_recipe")(config)
    moe_optim_config = installed_config()
    is_square = moe_optim_config is not None and moe_optim_config.format == "mxfp8_2d"
    if not (is_square and getattr(recipe, "mxfp8", bool)()):
        return recipe
    require_square_blocks(hasattr(recipe, "enable_2d_quantization"))
    return replace(recipe, enable_2d_quantization=True)
