"""Reads weights that are published quantized, such as DeepSeek-V3's in blockwise FP8, as bf16.

Sources of names, dtypes and values: DeepSeek-V3's ``inference/fp8_cast_bf16.py``;
compressed-tensors 0.20.0 (``compressors/pack_quantized``, ``compressors/mxfp4``); transformers
5.24.0 (``integrations/mxfp4.py``) for gpt-oss; and vLLM 0.33.0 (``models/deepseek_v4``) and SGLang
0.5.23 (``srt/models/deepseek_v4.py``), which load DeepSeek-V4.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import CheckpointReader, FileFormat, Recorded, TensorInfo
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.formats import INT4, MXFP4, MXFP8, BlockScaledFormat
from moe_optim.formats.reference.dequantizing import dequantize_bf16

Block = tuple[int, int]
"""Rows and columns per scale."""
_Said = Mapping[str, Any]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedEncoding:
    """Names, dtypes and shapes of quantized weights in one kind of checkpoint.

    A weight's name is a stem and a suffix. A value is element times scale in fp32, rounded to bf16.
    """

    block: Callable[[_Said], Block | None]
    """Returns the block that a ``quantization_config`` declares, None if it declares none."""
    declared: str
    """What ``block`` looks for, for errors."""
    format: BlockScaledFormat
    """Format with the same elements."""
    data: str
    """Suffix of elements."""
    data_dtypes: tuple[torch.dtype, ...]
    """Dtypes of elements. A weight is quantized if its data has one of them, or if the suffix
    belongs to quantized weights alone."""
    scale: str
    """Suffix of scales."""
    scale_dtypes: tuple[torch.dtype, ...]
    """Dtypes of scales, all exact in fp32."""
    shape_of_weight: str = ""
    """Suffix of rows and columns, if they are stored."""
    refused: tuple[str, ...] = ()
    """Suffixes of further tensors of a weight, which would change its values."""
    is_stacked: bool = False
    """Whether data is [E, R, blocks, bytes] and scales are [E, R, blocks], of weights that are
    transposed in bf16: [E, C, R]. Otherwise data is [R, C / elements per item]."""

    @property
    def weight(self) -> str:
        """Suffix of the bf16 weight."""
        return ".weight" if self.data.startswith(".") else ""

    @property
    def is_named(self) -> bool:
        """Whether the suffix of elements belongs to quantized weights alone."""
        return self.data not in ("", ".weight")

    def claims(self, name: str, info: TensorInfo) -> bool:
        """Return whether a tensor contains elements of this encoding."""
        return name.endswith(self.data) and (self.is_named or info.dtype in self.data_dtypes)

    def shape(self, data: TensorInfo) -> tuple[int, ...]:
        """Return the shape of the elements of a weight: [R, C], or [E, R, C] if stacked."""
        rank = 3 if self.is_stacked else 2
        per_item = self.format.elements_per_byte * data.dtype.itemsize
        return (*data.shape[: rank - 1], per_item * math.prod(data.shape[rank - 1 :]))


def _fp8_block(said: _Said) -> Block | None:
    given = said.get("weight_block_size")
    block = [n for n in given if type(n) is int and n > 0] if isinstance(given, list) else []
    is_fp8 = said.get("quant_method") == "fp8" and said.get("fmt", "e4m3") == "e4m3"
    return (block[0], block[1]) if is_fp8 and len(block) == 2 and block == given else None


def _group_of(said: _Said, format: str, kind: str) -> Block | None:
    """Return the block of symmetric groups of four bits, the same in all groups of layers."""
    groups = said.get("config_groups")
    if said.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict):
        return None
    if said.get("transform_config"):  # rotations, which a model in bf16 would lack
        return None
    defaults = {"type": "int", "strategy": "group", "symmetric": True, "actorder": None}
    wanted = defaults | {"num_bits": 4, "type": kind}
    sizes = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or (group.get("format") or said.get("format")) != format:
            return None
        if (said_of_group := defaults | weights) | wanted != said_of_group:
            return None
        sizes.add(weights.get("group_size"))
    size = sizes.pop() if len(sizes) == 1 else None
    return (1, size) if type(size) is int and size > 0 and size % 8 == 0 else None


def _mxfp4_of_deepseek(said: _Said) -> Block | None:
    return MXFP4.rowwise_block if _fp8_block(said) is not None else None


def _mxfp4_of_gpt_oss(said: _Said) -> Block | None:
    return MXFP4.rowwise_block if said.get("quant_method") == "mxfp4" else None


def _mxfp4_of_kimi(said: _Said) -> Block | None:
    block = _group_of(said, "mxfp4-pack-quantized", "float")
    return block if block == MXFP4.rowwise_block else None


ENCODINGS = (
    PublishedEncoding(
        block=_fp8_block,
        declared="quant_method fp8 with fmt e4m3 and a weight_block_size of two numbers",
        format=MXFP8,
        data="",
        data_dtypes=(torch.float8_e4m3fn,),
        scale="_scale_inv",
        scale_dtypes=(*_FLOATS, torch.float8_e8m0fnu),
    ),
    PublishedEncoding(  # DeepSeek-V4
        block=_fp8_block,
        declared="",
        format=MXFP8,
        data=".weight",
        data_dtypes=(torch.float8_e4m3fn,),
        scale=".scale",
        scale_dtypes=(*_FLOATS, torch.float8_e8m0fnu),
    ),
    PublishedEncoding(  # experts of DeepSeek-V4
        block=_mxfp4_of_deepseek,
        declared="",
        format=MXFP4,
        data=".weight",
        data_dtypes=(torch.int8, torch.uint8),
        scale=".scale",
        scale_dtypes=_E8M0,
    ),
    PublishedEncoding(  # gpt-oss
        block=_mxfp4_of_gpt_oss,
        declared="quant_method mxfp4",
        format=MXFP4,
        data="_blocks",
        data_dtypes=(torch.uint8,),
        scale="_scales",
        scale_dtypes=_E8M0[::-1],
        is_stacked=True,
    ),
    PublishedEncoding(  # Kimi K3
        block=_mxfp4_of_kimi,
        declared="compressed-tensors' mxfp4-pack-quantized",
        format=MXFP4,
        data=".weight_packed",
        data_dtypes=(torch.uint8,),
        scale=".weight_scale",
        scale_dtypes=_E8M0[::-1],
    ),
    PublishedEncoding(  # Kimi K2 Thinking and K2.5
        block=partial(_group_of, format="pack-quantized", kind="int"),
        declared="compressed-tensors' pack-quantized with symmetric groups of 4-bit integers, both "
        "without a transform_config",
        format=INT4,
        data=".weight_packed",
        data_dtypes=(torch.int32,),
        scale=".weight_scale",
        scale_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        shape_of_weight=".weight_shape",
        refused=(".weight_zero_point", ".weight_g_idx"),
    ),
)
"""Encodings that can be read, in order of preference where several claim a weight."""


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A quantized weight and the block of its scales."""

    encoding: PublishedEncoding
    block: Block
    name: str
    """Name of its elements."""

    @property
    def stem(self) -> str:
        return self.name.removesuffix(self.encoding.data)

    @property
    def scale(self) -> str:
        return self.stem + self.encoding.scale

    @property
    def weight(self) -> str:
        return self.stem + self.encoding.weight

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of all of its tensors."""
        end = self.encoding.shape_of_weight
        return (self.name, self.scale, *([self.stem + end] if end else []))

    def shown(self, data: TensorInfo) -> TensorInfo:
        """Return the weight as it is shown, given its elements."""
        *stack, rows, cols = self.encoding.shape(data)
        return TensorInfo((*stack, cols, rows) if stack else (rows, cols), torch.bfloat16)

    def fault(self, tensors: Mapping[str, TensorInfo]) -> str | None:
        """Return what is wrong with its tensors, if anything."""
        data, scale = tensors[self.name], tensors.get(self.scale)
        rank = 4 if self.encoding.is_stacked else 2
        if len(data.shape) != rank or data.dtype not in self.encoding.data_dtypes:
            axes = "[experts, rows, blocks, bytes]" if rank == 4 else "rows and columns"
            return (
                f"{self.name}: expected {axes} of {_spell(*self.encoding.data_dtypes)}, got "
                f"{_spell(data.dtype)} {list(data.shape)}"
            )
        if scale is None:
            return f"{self.scale}: missing"
        *stack, rows, cols = self.encoding.shape(data)
        height, width = self.block
        blocks = (*stack, -(-rows // height), -(-cols // width))
        is_whole = rank == 2 or data.shape[2] == blocks[-1]
        dtypes = self.encoding.scale_dtypes
        if scale.shape != blocks or scale.dtype not in dtypes or not is_whole:
            return (
                f"{self.scale}: expected {_spell(*dtypes)} {list(blocks)} for {list(data.shape)}, "
                f"got {_spell(scale.dtype)} {list(scale.shape)}"
            )
        if self.weight != self.name and self.weight in tensors:
            return f"{self.weight}: expected once, got it beside {self.name}"
        unread = (self.stem + other for other in self.encoding.refused)
        return next((f"{name}: not supported" for name in unread if name in tensors), None)

    def values(self, data: Tensor, scale: Tensor) -> Tensor:
        """Return the bf16 values [R, C] of elements and scales of one matrix."""
        has_exponents = scale.dtype in _E8M0
        format = replace(
            self.encoding.format,
            rowwise_block=self.block,
            scale_encoding="e8m0" if has_exponents else "fp32",
        )
        factors = scale.view(torch.uint8) if has_exponents else scale.float()
        codes = data.flatten(1).view(torch.uint8)
        return dequantize_bf16(codes.unsqueeze(0), factors.unsqueeze(0), format)[0]


class DequantizedWeights:
    """A checkpoint that shows its quantized weights as bf16 and hides their scales.

    Implements :class:`~moe_optim.checkpoint.files.reader.CheckpointReader`.
    """

    def __init__(
        self, stored: CheckpointReader, encodings: Mapping[PublishedEncoding, Block]
    ) -> None:
        """Check names, dtypes and shapes of quantized weights, given the block of each encoding.

        Raises:
            LayoutError: elements or scales are missing, superfluous, or of wrong shapes or dtypes.
        """
        self._stored = stored
        tensors = dict(stored.tensors)
        found = [*_find(tensors, encodings)]
        faults = [fault for one in found if (fault := one.fault(tensors))]
        for one in found:
            for name in one.stored:
                tensors.pop(name, None)
        named = {one for one in encodings if one.is_named} | {one.encoding for one in found}
        ends = {end for one in named for end in (one.scale, one.shape_of_weight) if end}
        faults += [f"{name}: left over" for name in tensors if name.endswith(tuple(ends))]
        if faults:
            raise LayoutError(
                f"{stored.path}: expected elements and scales of quantized weights, got "
                f"{len(faults)} fault(s):\n"
                + "".join(f"  {fault}\n" for fault in faults[:20])
                + "Fetch again what is missing or cut off; dequantize other scales with what wrote "
                "them."
            )
        self._quantized = {one.weight: one for one in found}
        tensors |= {one.weight: one.shown(stored.tensors[one.name]) for one in found}
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.path: Path = stored.path
        self.format: FileFormat = stored.format
        self.objects = stored.objects

    @property
    def recorded(self) -> Recorded:
        """Facts that the checkpoint records about itself."""
        return self._stored.recorded

    def read(self, name: str, *index: int | range) -> Tensor:
        """Return a tensor or a part of it, see ``CheckpointReader``."""
        one = self._quantized.get(name)
        if one is None:
            return self._stored.read(name, *index)
        first: int | range = index[0] if index else range(self.tensors[name].shape[0])
        if not one.encoding.is_stacked:
            values = self._values(one, None)
        elif isinstance(first, int):
            return self._values(one, first).T.contiguous()
        else:
            shape = (len(first), *self.tensors[name].shape[1:])
            values = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
            for into, expert in zip(values, first, strict=True):
                into.copy_(self._values(one, expert).T)
            return values
        if isinstance(first, int):
            return values[first].clone()
        return values if len(first) == len(values) else values[first.start : first.stop].clone()

    def cuts(self, name: str, *index: int) -> Sequence[int]:
        """Return the places at which an axis can be cut: stacked experts come apart."""
        one = self._quantized.get(name)
        if one is None:
            return self._stored.cuts(name, *index)
        size = self.tensors[name].shape[len(index)]
        return range(size + 1) if one.encoding.is_stacked and not index else (0, size)

    def _values(self, one: _Quantized, expert: int | None) -> Tensor:
        for name in one.stored[2:]:  # elements fill whole words, and rows may be shorter
            if name not in self._stored.tensors:
                continue
            said, shape = self._stored.read(name).tolist(), [*self.tensors[one.weight].shape]
            if said != shape:
                raise LayoutError(
                    f"{self.path}: {name}: expected {shape}, as elements have, got {said}. "
                    "Dequantize it with the library that quantized it."
                )
        index = () if expert is None else (expert,)
        return one.values(*(self._stored.read(name, *index) for name in (one.name, one.scale)))


def _find(
    tensors: Mapping[str, TensorInfo], encodings: Mapping[PublishedEncoding, Block]
) -> Iterator[_Quantized]:
    """Yield each quantized weight, in the first encoding whose scales exist, else in the first."""
    for name, info in tensors.items():
        claims = [
            _Quantized(encoding, block, name)
            for encoding, block in encodings.items()
            if encoding.claims(name, info)
        ]
        complete = [one for one in claims if one.scale in tensors]
        yield from (complete or claims)[:1]


def encodings_of(quantization: Any, where: str) -> dict[PublishedEncoding, Block]:
    """Return the encodings declared by a ``quantization_config``; ConfigError if there is none."""
    said = quantization if isinstance(quantization, dict) else {}
    found = {one: block for one in ENCODINGS if (block := one.block(said)) is not None}
    if not found:
        *known, last = (one.declared for one in ENCODINGS if one.declared)
        raise ConfigError(
            f"{where}: quantization_config: expected {', '.join(known)}, or {last}, got "
            f"{str(quantization)[:120]}. Convert weights in bf16, or dequantize them with what "
            "quantized them."
        )
    return found


def _spell(*dtypes: torch.dtype) -> str:
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(names)} or {last}" if names else last
