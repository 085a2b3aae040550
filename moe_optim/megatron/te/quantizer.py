"""Transformer Engine's quantizers, where it can be imported."""

import importlib
from typing import Any

from moe_optim.formats import BlockScaledFormat


def import_error() -> str | None:
    """Say why Transformer Engine cannot be used here, or None: import it."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken extension raises whatever it likes
        return f"{type(error).__name__}: {error}"
    return None


def make_quantizer(format: BlockScaledFormat) -> Any:
    """Return the quantizer that Megatron's recipe for a format gives weights."""
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
    return MXFP8Quantizer(e4m3, with_2d_quantization=format.is_2d, **usage)
