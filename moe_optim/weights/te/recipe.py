"""Transformer Engine recipes and quantizers of weights."""

import importlib
import inspect
from dataclasses import replace
from typing import Any

from moe_optim.environment import find_package
from moe_optim.errors import ConfigError
from moe_optim.formats import BlockScaledFormat
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config

_MODULES = ("transformer_engine", "transformer_engine.pytorch")


def import_error() -> str | None:
    """Return why Transformer Engine cannot be imported, or None if it was imported."""
    try:
        importlib.import_module(_MODULES[-1])
    except Exception as error:  # a broken extension can raise anything
        if isinstance(error, ModuleNotFoundError) and error.name in _MODULES:
            return "none installed"
        return f"{type(error).__name__}: {error}"
    return None


def make_quantizer(format: BlockScaledFormat) -> Any:
    """Return the weight quantizer of a format.

    Raises:
        ConfigError: Transformer Engine has no class for the format, or is too old.
    """
    if format.is_row_only:
        raise ConfigError(
            f"moe_optim: storage: transformer_engine: expected a format of both directions, got "
            f"{format.name}. Set storage: portable."
        )
    from transformer_engine.pytorch import (
        DType,
        Float8BlockQuantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
    )

    e4m3, usage = DType.kFloat8E4M3, {"rowwise": True, "columnwise": True}
    if format.element == "e2m1":
        return NVFP4Quantizer(with_2d_quantization=True, **usage)
    if format.scale_encoding != "e8m0":
        is_rounded = format.scale_encoding == "power_of_two"
        return Float8BlockQuantizer(
            e4m3, force_pow_2_scales=is_rounded, block_scaling_dim=2, **usage
        )
    if not format.is_2d:
        return MXFP8Quantizer(e4m3, **usage)
    square = "with_2d_quantization"
    _require_square_blocks(square in inspect.signature(MXFP8Quantizer).parameters)
    return MXFP8Quantizer(e4m3, **{square: True}, **usage)


def get_fp8_recipe(config: Any) -> Any:
    """Return Megatron's recipe, with 32 x 32 weight blocks for ``format: mxfp8_2d``.

    Only the recipe of ``--fp8-recipe mxfp8`` is changed. Raises ConfigError if Transformer Engine
    is too old for square MXFP8 blocks.
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
