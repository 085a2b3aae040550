"""Names, dtypes and scales of quantized weights in inference engines, by format and convention.

Sources: compressed-tensors 0.20.0 (``compressors/*/base.py``), vLLM 0.33.0
(``model_executor/layers/quantization``: ``fp8.py``, ``modelopt.py`` and
``compressed_tensors/compressed_tensors_moe``) and SGLang 0.5.23 (``srt/layers/quantization``:
``fp8.py``, ``modelopt_quant.py`` and ``compressed_tensors/schemes``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from moe_optim.errors import ConfigError
from moe_optim.formats import FP8_BLOCK, MXFP8, MXFP8_2D, NVFP4, BlockScaledFormat

EngineFormat = Literal["mxfp8", "nvfp4", "fp8_block", "fp8"]
ConventionName = Literal["compressed_tensors", "modelopt", "deepseek"]

ENGINE_FORMATS: Mapping[str, EngineFormat] = MappingProxyType(
    {
        MXFP8.name: "mxfp8",
        MXFP8_2D.name: "mxfp8",  # scales of 32x32 blocks, repeated per row
        NVFP4.name: "nvfp4",  # scales of 16x16 blocks, repeated per row
        FP8_BLOCK.name: "fp8_block",
    }
)
"""Engine format by training format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """Suffixes that replace ``weight`` for a quantized [R, C] weight, with dtypes and semantics."""

    format: EngineFormat
    name: ConventionName
    data: str = "weight"
    """[R, C] ``float8_e4m3fn``; NVFP4: [R, C/2] ``uint8``, low nibble first."""
    scale: str = "weight_scale"
    """Factor of elements. MXFP8: [R, C/32] ``uint8``, exponents with a bias of 127; NVFP4: [R,
    C/16] ``float8_e4m3fn``; FP8 blocks: [R/128, C/128] ``float32``; per-tensor FP8: [R, 1]
    ``float32``."""
    global_scale: str | None = None
    """``float32``, NVFP4 only."""
    divides: bool = False
    """Whether values are divided by the global scale, of shape [1]; otherwise they are multiplied
    by it, of shape []."""
    engines: tuple[str, ...]
    """Engines that support it."""

    @property
    def data_dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return torch.uint8 if self.format == "nvfp4" else torch.float8_e4m3fn

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the block scales."""
        return {
            "mxfp8": torch.uint8,
            "nvfp4": torch.float8_e4m3fn,
            "fp8_block": torch.float32,
            "fp8": torch.float32,
        }[self.format]

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and columns per block scale."""
        return {"mxfp8": (1, 32), "nvfp4": (1, 16), "fp8_block": (128, 128)}[self.format]


_BOTH = ("vLLM", "SGLang")

CONVENTIONS: tuple[Convention, ...] = (
    Convention(format="mxfp8", name="compressed_tensors", engines=("vLLM",)),
    Convention(format="mxfp8", name="modelopt", engines=("vLLM",)),
    Convention(format="mxfp8", name="deepseek", scale="weight_scale_inv", engines=("SGLang",)),
    Convention(format="nvfp4", name="modelopt", global_scale="weight_scale_2", engines=_BOTH),
    Convention(
        format="nvfp4",
        name="compressed_tensors",
        data="weight_packed",
        global_scale="weight_global_scale",
        divides=True,
        engines=_BOTH,
    ),
    Convention(format="fp8_block", name="deepseek", scale="weight_scale_inv", engines=_BOTH),
    Convention(format="fp8_block", name="compressed_tensors", engines=_BOTH),
)
"""Conventions of blockwise formats; the first of each format is its default."""

ONE_SCALE = Convention(format="fp8", name="compressed_tensors", engines=_BOTH)
"""FP8 weights with per-tensor scaling. The scale is repeated per row, so that engines scale
activations per token and the two halves of a fused weight may differ."""


def find_convention(format: BlockScaledFormat, name: str | None = None) -> Convention:
    """Return the named or default convention of a training format; ConfigError if unknown."""
    of_format = [one for one in CONVENTIONS if one.format == ENGINE_FORMATS[format.name]]
    return choose_convention(of_format, name, format.name)


def choose_convention(of_format: Sequence[Convention], name: str | None, format: str) -> Convention:
    """Return the convention called ``name``, else the first; ``format`` is for the ConfigError."""
    found = next((one for one in of_format if name in (None, one.name)), None)
    if found is None:
        raise ConfigError(
            f"convention: expected one of {', '.join(one.name for one in of_format)} for "
            f"{format}, got {name!r}. Name one of them, or none."
        )
    return found
