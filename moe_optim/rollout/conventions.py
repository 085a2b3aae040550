"""Names, dtypes and scales of quantized weights in inference engines, by format and convention.

Sources: compressed-tensors 0.20.0 (``compressors/*/base.py``), vLLM 0.33.0
(``model_executor/layers/quantization``: ``fp8.py``, ``modelopt.py`` and
``compressed_tensors/compressed_tensors_moe``) and SGLang 0.5.23 (``srt/layers/quantization``:
``fp8.py``, ``modelopt_quant.py`` and ``compressed_tensors/schemes``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from moe_optim.errors import ConfigError
from moe_optim.formats import (
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    INT4,
    INT4_G128,
    MXFP4,
    MXFP8,
    MXFP8_2D,
    MXFP8_ROWS,
    NVFP4,
    NVFP4_ROWS,
    BlockScaledFormat,
)

EngineFormat = Literal["mxfp8", "mxfp4", "nvfp4", "int4", "int4_g128", "fp8_block", "fp8"]
ConventionName = Literal["compressed_tensors", "modelopt", "deepseek"]

ENGINE_FORMATS: Mapping[str, EngineFormat] = MappingProxyType(
    {
        MXFP8.name: "mxfp8",
        MXFP8_2D.name: "mxfp8",  # scales of 32x32 blocks, repeated per row
        MXFP8_ROWS.name: "mxfp8",
        MXFP4.name: "mxfp4",
        NVFP4.name: "nvfp4",  # scales of 16x16 blocks, repeated per row
        NVFP4_ROWS.name: "nvfp4",
        INT4.name: "int4",
        INT4_G128.name: "int4_g128",
        FP8_BLOCK.name: "fp8_block",
        FP8_BLOCK_FP32.name: "fp8_block",
    }
)
"""Engine format by training format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensors:
    """Dtypes and block of an engine format, the same in every convention."""

    data_dtype: torch.dtype
    elements: int = 1
    scale_dtypes: tuple[torch.dtype, ...]
    scale_block: tuple[int, int]


_E4M3, _FLOATS = torch.float8_e4m3fn, (torch.float32, torch.bfloat16, torch.float16)
_INT4 = _Tensors(
    data_dtype=torch.int32,
    elements=8,
    scale_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    scale_block=INT4.rowwise_block,
)
_TENSORS: Mapping[EngineFormat, _Tensors] = MappingProxyType(
    {
        "mxfp8": _Tensors(data_dtype=_E4M3, scale_dtypes=(torch.uint8,), scale_block=(1, 32)),
        "mxfp4": _Tensors(
            data_dtype=torch.uint8, elements=2, scale_dtypes=(torch.uint8,), scale_block=(1, 32)
        ),
        "nvfp4": _Tensors(
            data_dtype=torch.uint8, elements=2, scale_dtypes=(_E4M3,), scale_block=(1, 16)
        ),
        "int4": _INT4,
        "int4_g128": replace(_INT4, scale_block=INT4_G128.rowwise_block),
        "fp8_block": _Tensors(
            data_dtype=_E4M3,
            scale_dtypes=(*_FLOATS, torch.float8_e8m0fnu),
            scale_block=FP8_BLOCK.rowwise_block,
        ),
        "fp8": _Tensors(data_dtype=_E4M3, scale_dtypes=_FLOATS[:1], scale_block=(1, 0)),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """Suffixes that replace ``weight`` for a quantized [R, C] weight, with dtypes and semantics."""

    format: EngineFormat
    name: ConventionName
    data: str = "weight"
    """Elements [R, C]; FP8: ``float8_e4m3fn``; MXFP4 and NVFP4: [R, C/2] ``uint8``, low nibble
    first; INT4: [R, C/8] ``int32``, lowest nibble first."""
    scale: str = "weight_scale"
    """Factor of elements. MXFP8 and MXFP4: [R, C/32] ``uint8``, exponents with a bias of 127;
    NVFP4: [R, C/16] ``float8_e4m3fn``; INT4: [R, C/32] or [R, C/128] ``bfloat16``; FP8 blocks:
    [R/128, C/128] ``float32``; per-tensor FP8: [R, 1] ``float32``."""
    global_scale: str | None = None
    """``float32``, NVFP4 only."""
    divides: bool = False
    """Whether values are divided by the global scale, of shape [1]; otherwise they are multiplied
    by it, of shape []."""
    shape: str | None = None
    """R and C, ``int64`` [2], INT4 only."""
    engines: tuple[str, ...]
    """Engines that support it."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All suffixes, data first."""
        names = self.data, self.scale, self.global_scale, self.shape
        return tuple(name for name in names if name is not None)

    @property
    def data_dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return _TENSORS[self.format].data_dtype

    @property
    def elements(self) -> int:
        """Elements per item of the data tensor."""
        return _TENSORS[self.format].elements

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of published block scales, the exported one first."""
        return _TENSORS[self.format].scale_dtypes

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of exported block scales."""
        return self.scale_dtypes[0]

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and columns per block scale; 0 columns for whole rows."""
        return _TENSORS[self.format].scale_block


_BOTH = ("vLLM", "SGLang")
_PACKED_INT4 = Convention(
    format="int4",
    name="compressed_tensors",
    data="weight_packed",
    shape="weight_shape",
    engines=_BOTH,
)

CONVENTIONS: tuple[Convention, ...] = (
    Convention(format="mxfp8", name="compressed_tensors", engines=("vLLM",)),
    Convention(format="mxfp8", name="modelopt", engines=("vLLM",)),
    Convention(format="mxfp8", name="deepseek", scale="weight_scale_inv", engines=("SGLang",)),
    Convention(format="mxfp4", name="compressed_tensors", data="weight_packed", engines=("vLLM",)),
    Convention(format="nvfp4", name="modelopt", global_scale="weight_scale_2", engines=_BOTH),
    Convention(
        format="nvfp4",
        name="compressed_tensors",
        data="weight_packed",
        global_scale="weight_global_scale",
        divides=True,
        engines=_BOTH,
    ),
    _PACKED_INT4,
    replace(_PACKED_INT4, format="int4_g128"),
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
