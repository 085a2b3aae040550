"""Transformer Engine's quantizers, where it can be imported."""

import importlib
import inspect
from typing import Any

from moe_optim.environment import find_package
from moe_optim.errors import ConfigError
from moe_optim.formats import BlockScaledFormat


def import_error() -> str | None:
    """Say why Transformer Engine cannot be used here, or None: import it."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken extension raises whatever it likes
        return f"{type(error).__name__}: {error}"
    return None


def require_square_blocks(has_them: bool) -> None:
    """Refuse ``mxfp8_2d`` where MXFP8 of Transformer Engine has no square blocks.

    Raises:
        ConfigError: it is older than 2.19.
    """
    if not has_them:
        package = find_package("transformer-engine")
        raise ConfigError(
            "moe_optim: format: mxfp8_2d: expected Transformer Engine 2.19 or newer, whose MXFP8 "
            f"has square blocks, got {package or 'none'}. Install it, or set format: mxfp8."
        )


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
    require_square_blocks(square in inspect.signature(MXFP8Quantizer).parameters)
    return MXFP8Quantizer(e4m3, **{square: True}, **usage)
