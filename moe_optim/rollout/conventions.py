"""How inference engines name, type and scale quantized weights: one value a format and convention.

Read in released packages: compressed-tensors 0.20.0 (``compressors/*/base.py``), vLLM 0.33.0
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
        MXFP8_2D.name: "mxfp8",  # the scales of 32x32 blocks, repeated for each row
        NVFP4.name: "nvfp4",  # those of 16x16 blocks, likewise
        FP8_BLOCK.name: "fp8_block",
    }
)
"""By what training calls the format: what engines read it as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """What stands in place of ``weight`` for one quantized [R, C] weight, and what it means."""

    format: EngineFormat
    name: ConventionName
    data: str
    """[R, C] ``float8_e4m3fn``; of NVFP4 [R, C/2] ``uint8``, low nibble first."""
    scale: str
    """Of MXFP8 [R, C/32] ``uint8``, exponents with a bias of 127; of NVFP4 [R, C/16]
    ``float8_e4m3fn``; of FP8 blocks [R/128, C/128] ``float32``; of FP8 without blocks [R, 1]
    ``float32``. Elements are multiplied by it."""
    global_scale: str | None = None
    """Of NVFP4 alone, ``float32``."""
    divides: bool = False
    """Whether values are divided by the global scale, which is [1] then; else they are multiplied
    by it, and it is []."""
    engines: tuple[str, ...]
    """That load it."""

    @property
    def data_dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return torch.uint8 if self.format == "nvfp4" else torch.float8_e4m3fn

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales of blocks."""
        return {
            "mxfp8": torch.uint8,
            "nvfp4": torch.float8_e4m3fn,
            "fp8_block": torch.float32,
            "fp8": torch.float32,
        }[self.format]

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, of formats with blocks."""
        return {"mxfp8": (1, 32), "nvfp4": (1, 16), "fp8_block": (128, 128)}[self.format]


CONVENTIONS: tuple[Convention, ...] = (
    Convention(
        format="mxfp8",
        name="compressed_tensors",
        data="weight",
        scale="weight_scale",
        engines=("vLLM",),
    ),
    Convention(
        format="mxfp8",
        name="modelopt",
        data="weight",
        scale="weight_scale",
        engines=("vLLM",),
    ),
    Convention(
        format="mxfp8",
        name="deepseek",
        data="weight",
        scale="weight_scale_inv",
        engines=("SGLang",),
    ),
    Convention(
        format="nvfp4",
        name="modelopt",
        data="weight",
        scale="weight_scale",
        global_scale="weight_scale_2",
        engines=("vLLM", "SGLang"),
    ),
    Convention(
        format="nvfp4",
        name="compressed_tensors",
        data="weight_packed",
        scale="weight_scale",
        global_scale="weight_global_scale",
        divides=True,
        engines=("vLLM", "SGLang"),
    ),
    Convention(
        format="fp8_block",
        name="deepseek",
        data="weight",
        scale="weight_scale_inv",
        engines=("vLLM", "SGLang"),
    ),
    Convention(
        format="fp8_block",
        name="compressed_tensors",
        data="weight",
        scale="weight_scale",
        engines=("vLLM", "SGLang"),
    ),
)
"""All of those with blocks. The first of a format is taken where none is named."""

ONE_SCALE = Convention(
    format="fp8",
    name="compressed_tensors",
    data="weight",
    scale="weight_scale",
    engines=("vLLM", "SGLang"),
)
"""Of FP8 weights with one scale each, which every row gets: so engines scale activations token by
token, and two halves of a fused weight need not agree."""


def find_convention(format: BlockScaledFormat, name: str | None = None) -> Convention:
    """Return how weights of a training format are named, by the name of the convention if given.

    Raises:
        ConfigError: the format has none of that name.
    """
    of_format = [one for one in CONVENTIONS if one.format == ENGINE_FORMATS[format.name]]
    return choose_convention(of_format, name, format.name)


def choose_convention(of_format: Sequence[Convention], name: str | None, format: str) -> Convention:
    """Return the convention of a name, or the first one.

    Args:
        of_format: those there are.
        name: of the wanted one, None for any.
        format: what errors call the format.

    Raises:
        ConfigError: none of them has the name.
    """
    found = next((one for one in of_format if name in (None, one.name)), None)
    if found is None:
        raise ConfigError(
            f"convention: expected one of {', '.join(one.name for one in of_format)} for "
            f"{format}, got {name!r}. Name one of them, or none."
        )
    return found
