"""Recipes and quantizers of Transformer Engine: what weights are kept in between steps."""

import importlib
import inspect
import os
from dataclasses import replace
from typing import Any

from moe_optim.environment import find_package
from moe_optim.errors import ConfigError
from moe_optim.formats import BlockScaledFormat
from moe_optim.integration.patching.active import installed_config
from moe_optim.integration.patching.engine import original

_OTHER_BYTES: dict[str, dict[str, tuple[str, ...]]] = {
    "--fp8-recipe blockwise": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("1",)},
    "--fp4-recipe nvfp4": {
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("1",),
        "NVTE_NVFP4_4OVER6": ("weights", "all"),
    },
}
"""Recipe -> variables that Transformer Engine reads -> values that make bytes of no format here."""


def import_error() -> str | None:
    """Say why Transformer Engine cannot be used here, or None: import it."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken extension raises whatever it likes
        return f"{type(error).__name__}: {error}"
    return None


def make_quantizer(format: BlockScaledFormat) -> Any:
    """Return the quantizer that Megatron's recipe for a format gives weights.

    Raises:
        ConfigError: this Transformer Engine is too old for the format.
    """
    from transformer_engine.pytorch import (
        DType,
        Float8BlockQuantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
    )

    e4m3, usage = DType.kFloat8E4M3, {"rowwise": True, "columnwise": True}
    if format.name == "nvfp4":
        return NVFP4Quantizer(with_2d_quantization=True, **usage)
    if format.name == "fp8_block":
        return Float8BlockQuantizer(e4m3, force_pow_2_scales=True, block_scaling_dim=2, **usage)
    if not format.is_2d:
        return MXFP8Quantizer(e4m3, **usage)
    square = "with_2d_quantization"
    _require_square_blocks(square in inspect.signature(MXFP8Quantizer).parameters)
    return MXFP8Quantizer(e4m3, **{square: True}, **usage)


def get_fp8_recipe(config: Any) -> Any:
    """Return Megatron's recipe; with ``format: mxfp8_2d`` weights get blocks of 32 x 32.

    Args:
        config: Megatron's transformer configuration. Recipes other than ``--fp8-recipe mxfp8`` are
            returned as they are.

    Raises:
        ConfigError: Transformer Engine is too old to have square blocks in MXFP8.
    """
    recipe = original("megatron.core.fp8_utils:get_fp8_recipe")(config)
    installed = installed_config()
    is_square = installed is not None and installed.format == "mxfp8_2d"
    if not is_square or not getattr(recipe, "mxfp8", bool)():
        return recipe
    _require_square_blocks(hasattr(recipe, "enable_2d_quantization"))
    return replace(recipe, enable_2d_quantization=True)


def _require_square_blocks(has_them: bool) -> None:
    if not has_them:
        package = find_package("transformer-engine")
        raise ConfigError(
            "moe_optim: format: mxfp8_2d: expected Transformer Engine 2.19 or newer, whose MXFP8 "
            f"has square blocks, got {package or 'none'}. Install it, or set format: mxfp8."
        )


def native_recipe(model: Any) -> str | None:
    """Return the flag of the recipe that weights are kept in between steps, None for bf16.

    Args:
        model: Megatron's transformer configuration.
    """
    for on, kept, name in (("fp8", "fp8_param", "fp8_recipe"), ("fp4", "fp4_param", "fp4_recipe")):
        if getattr(model, on) and getattr(model, kept):
            recipe = getattr(model, name)
            return f"--{name.replace('_', '-')} {getattr(recipe, 'value', recipe)}"
    return None


def variables_of_other_bytes(recipe: str) -> list[str]:
    """Return what the environment sets so that a recipe makes weights in no format of ours.

    Args:
        recipe: flag of the recipe, see :func:`native_recipe`.
    """
    return [
        f"{variable}={os.environ[variable]}"
        for variable, values in _OTHER_BYTES.get(recipe, {}).items()
        if os.environ.get(variable) in values
    ]
