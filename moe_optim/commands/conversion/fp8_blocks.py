"""Reads weights published in FP8 blocks, such as DeepSeek-V3's, as bf16."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optim.checkpoint.files.reader import CheckpointReader, FileFormat, Recorded, TensorInfo
from moe_optim.errors import ConfigError, LayoutError

SCALE = "_scale_inv"
"""Suffix of the name of a weight's scales, one per block; dequantization multiplies by them."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""DeepSeek publishes the first, Qwen the next two; ``scale_fmt: ue8m0`` may store bare exponents.
All are exact in fp32.
"""


class DequantizedBlocks:
    """A checkpoint that shows its FP8 weights as bf16 and hides their scales.

    Implements :class:`~moe_optim.checkpoint.files.reader.CheckpointReader`. A value is element
    times scale in fp32, rounded to bf16, as in DeepSeek's own conversion.
    """

    def __init__(self, stored: CheckpointReader, block: tuple[int, int]) -> None:
        """Check names and shapes of E4M3 weights [R, C] and their scales, one per ``block``.

        Raises:
            LayoutError: a weight has no scales, or scales of the wrong shape or dtype.
        """
        self._stored, self._block = stored, block
        tensors = dict(stored.tensors)
        self._quantized = [n for n, info in tensors.items() if info.dtype == torch.float8_e4m3fn]
        faults = [fault for name in self._quantized if (fault := self._fault(name))]
        if faults:
            raise LayoutError(
                f"{stored.path}: expected scales beside weights in FP8, got {len(faults)} "
                "fault(s):\n" + "".join(f"  {fault}\n" for fault in faults[:20]) + "Fetch again "
                "what is missing or cut off; dequantize other scales with what wrote them."
            )
        for name in self._quantized:
            del tensors[name + SCALE]
            tensors[name] = TensorInfo(tensors[name].shape, torch.bfloat16)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.path: Path = stored.path
        self.format: FileFormat = stored.format
        self.objects = stored.objects

    @property
    def recorded(self) -> Recorded:
        """Facts that the checkpoint records about itself."""
        return self._stored.recorded

    def read(self, name: str, first: int | None = None) -> Tensor:
        """Return a tensor, or index ``first`` of its first axis."""
        if self._stored.tensors[name].dtype != torch.float8_e4m3fn:
            return self._stored.read(name, first)
        scale = self._stored.read(name + SCALE).float()
        values = self._stored.read(name).float()
        for axis, size in enumerate(self._block):
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, values.shape[axis])
        values = values.mul_(scale).bfloat16()
        return values if first is None else values[first].clone()

    def _fault(self, name: str) -> str | None:
        shape, scale = self._stored.tensors[name].shape, self._stored.tensors.get(name + SCALE)
        if len(shape) != 2:
            return f"{name}: expected rows and columns, got {list(shape)}"
        blocks = tuple(-(-n // size) for n, size in zip(shape, self._block, strict=True))
        if scale is None:
            return f"{name}{SCALE}: missing"
        if scale not in [TensorInfo(blocks, dtype) for dtype in SCALE_DTYPES]:
            *dtypes, last = (str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES)
            return (
                f"{name}{SCALE}: expected {', '.join(dtypes)} or {last} {list(blocks)} for "
                f"{list(shape)}, got {str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}"
            )
        return None


def block_of(quantization: Any, where: str) -> tuple[int, int]:
    """Return [rows, columns] of a block from ``quantization_config``; ConfigError for others."""
    said = quantization if isinstance(quantization, dict) else {}
    given = said.get("weight_block_size")
    block = [n for n in given if type(n) is int and n > 0] if isinstance(given, list) else []
    is_fp8 = said.get("quant_method") == "fp8" and said.get("fmt", "e4m3") == "e4m3"
    if not is_fp8 or len(block) != 2 or block != given:
        raise ConfigError(
            f"{where}: quantization_config: expected quant_method fp8 with fmt e4m3 and a "
            f"weight_block_size of two numbers, got {str(quantization)[:120]}. Convert weights in "
            "bf16, or dequantize them with what quantized them."
        )
    rows, cols = block
    return rows, cols
