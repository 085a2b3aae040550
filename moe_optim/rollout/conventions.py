"""Names, dtypes and scales of quantized weights in inference engines, by format and convention.

Sources: compressed-tensors 0.20.0 (``compressors/*/base.py``), vLLM 0.33.0
(``model_executor/layers/quantization``: ``fp8.py``, ``modelopt.py`` and
``compressed_tensors/compressed_tensors_moe``) and SGLang 0.5.23 (``srt/layers/quantization``:
``fp8.py``, ``modelopt_quant.py`` and ``compressed_tensors/schemes``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

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
class Convention:
    """Suffixes that replace ``weight`` for a quantized [R, C] weight, with dtypes and semantics."""

    format: EngineFormat
    name: ConventionName
    engines: tuple[str, ...]
    """Engines that support it."""
    data_dtype: torch.dtype
    """Dtype of the elements."""
    elements: int = 1
    """Elements per item of the data tensor."""
    scale_dtypes: tuple[torch.dtype, ...]
    """Dtypes of published block scales, the exported one first."""
    scale_block: tuple[int, int]
    """Rows and columns per block scale; 0 columns for whole rows."""
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
    input_scale: str | None = None
    """Factor of quantized inputs, like the global scale of the same convention; NVFP4 only."""
    shape: str | None = None
    """R and C, ``int64`` [2], INT4 only."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All suffixes of a weight, data first; without that of its inputs."""
        names = self.data, self.scale, self.global_scale, self.shape
        return tuple(name for name in names if name is not None)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of exported block scales."""
        return self.scale_dtypes[0]


_E4M3, _FLOATS = torch.float8_e4m3fn, (torch.float32, torch.bfloat16, torch.float16)
_INT4 = {
    "data_dtype": torch.int32,
    "elements": 8,
    "scale_dtypes": (torch.bfloat16, torch.float16, torch.float32),
}
_TENSORS: Mapping[EngineFormat, Mapping[str, Any]] = {
    "mxfp8": {"data_dtype": _E4M3, "scale_dtypes": (torch.uint8,), "scale_block": (1, 32)},
    "mxfp4": {
        "data_dtype": torch.uint8,
        "elements": 2,
        "scale_dtypes": (torch.uint8,),
        "scale_block": (1, 32),
    },
    "nvfp4": {
        "data_dtype": torch.uint8,
        "elements": 2,
        "scale_dtypes": (_E4M3,),
        "scale_block": (1, 16),
    },
    "int4": {**_INT4, "scale_block": INT4.rowwise_block},
    "int4_g128": {**_INT4, "scale_block": INT4_G128.rowwise_block},
    "fp8_block": {
        "data_dtype": _E4M3,
        "scale_dtypes": (*_FLOATS, torch.float8_e8m0fnu),
        "scale_block": FP8_BLOCK.rowwise_block,
    },
    "fp8": {"data_dtype": _E4M3, "scale_dtypes": _FLOATS[:1], "scale_block": (1, 0)},
}
"""What is the same in every convention of an engine format."""


def _convention(
    format: EngineFormat, name: ConventionName, *engines: str, **names: Any
) -> Convention:
    return Convention(format=format, name=name, engines=engines, **_TENSORS[format], **names)


_BOTH = ("vLLM", "SGLang")
_PACKED = {"data": "weight_packed"}

CONVENTIONS: tuple[Convention, ...] = (
    _convention("mxfp8", "compressed_tensors", "vLLM"),
    _convention("mxfp8", "modelopt", "vLLM"),
    _convention("mxfp8", "deepseek", "SGLang", scale="weight_scale_inv"),
    _convention("mxfp4", "compressed_tensors", "vLLM", **_PACKED),
    _convention(
        "nvfp4",
        "modelopt",
        *_BOTH,
        global_scale="weight_scale_2",
        input_scale="input_scale",
    ),
    _convention(
        "nvfp4",
        "compressed_tensors",
        *_BOTH,
        **_PACKED,
        global_scale="weight_global_scale",
        input_scale="input_global_scale",
        divides=True,
    ),
    _convention("int4", "compressed_tensors", *_BOTH, **_PACKED, shape="weight_shape"),
    _convention("int4_g128", "compressed_tensors", *_BOTH, **_PACKED, shape="weight_shape"),
    _convention("fp8_block", "deepseek", *_BOTH, scale="weight_scale_inv"),
    _convention("fp8_block", "compressed_tensors", *_BOTH),
)
"""Conventions of blockwise formats; the first of each format is its default."""

ONE_SCALE = _convention("fp8", "compressed_tensors", *_BOTH)
"""FP8 weights with per-tensor scaling. The scale is repeated per row, so that engines scale
activations per token and the two halves of a fused weight may differ."""


def find_convention(format: BlockScaledFormat | None, name: str | None = None) -> Convention:
    """Return the named or default convention of a training format, None for per-tensor scaling.

    Raises:
        ConfigError: the format has no convention of this name.
    """
    of_format: Sequence[Convention] = [ONE_SCALE]
    if format is not None:
        of_format = [one for one in CONVENTIONS if one.format == ENGINE_FORMATS[format.name]]
    found = next((one for one in of_format if name in (None, one.name)), None)
    if found is None:
        raise ConfigError(
            f"convention: expected {' or '.join(one.name for one in of_format)} for "
            f"{'per-tensor scaling' if format is None else format.name}, got {name!r}. Omit it for "
            "the default."
        )
    return found
