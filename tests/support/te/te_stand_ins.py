"""Tensors with the fields of Transformer Engine's weights, which cannot be made without a GPU."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from moe_optim.formats import DIRECTIONS, BlockScaledFormat, reference

SPOILED = 0xA5  # of bytes that have to be overwritten


class StandIn:
    """What the storage reads and writes of one weight: fields, shape and dimensions."""

    device = torch.device("cpu")

    def __init__(self, format: BlockScaledFormat, master: torch.Tensor) -> None:
        self.shape = master.shape
        quantized = reference.quantize(master.unsqueeze(0), format)
        self._rowwise_data = quantized.rowwise_data[0].clone()
        self._columnwise_data = quantized.columnwise_data[0].clone()
        for direction in DIRECTIONS:
            setattr(self, f"_{direction}_scale_inv", padded_scale(quantized, direction))
            if format.has_global_amax:
                setattr(self, f"_amax_{direction}", quantized.global_amax.clone())
        self._high_precision_init_val = master.bfloat16()
        self._quantizer = SimpleNamespace(with_2d_quantization=format.is_2d)
        if format.scale_itemsize == 4:
            self._quantizer.force_pow_2_scales = format.scale_encoding == "power_of_two"


class Float8BlockwiseQTensor(StandIn):
    """Named as the class it stands for, which is how the format is found."""

    _is_2D_scaled = True


class MXFP8Tensor(StandIn):
    """Named as the class it stands for."""

    _with_gemm_swizzled_scales = False


class NVFP4Tensor(StandIn):
    """Named as the class it stands for."""

    _with_gemm_swizzled_scales = False
    _row_scaled_nvfp4 = False
    _nvfp4_use_4over6 = False


class Float8Quantizer:
    """Named as the class it stands for: scales of delayed scaling."""


class Float8CurrentScalingQuantizer:
    """Named as the class it stands for: scales of the last amax."""

    dtype = SimpleNamespace(name="kFloat8E4M3")
    force_pow_2_scales = False
    amax_epsilon = 0.0


class Float8Tensor:
    """Named as the class it stands for: bytes [R, C] and one scale."""

    device = torch.device("cpu")
    dtype = torch.bfloat16
    _transpose_invalid = True

    def __init__(self, master: torch.Tensor, quantizer: object) -> None:
        self.shape = master.shape
        self._quantizer = quantizer
        self._scale_inv = (master.abs().max() / 448.0).view(1)
        self._data = (master / self._scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
        self._transpose = None

    def dequantize(self, *, dtype: torch.dtype) -> torch.Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(dtype)


class Float8BlockQuantizer:
    """Named as the class it stands for: a group has its format from it."""

    block_scaling_dim = 2

    def __init__(self, force_pow_2_scales: bool = True) -> None:
        self.force_pow_2_scales = force_pow_2_scales


class MXFP8Quantizer:
    """Named as the class it stands for."""

    def __init__(self, with_2d_quantization: bool = False) -> None:
        self.with_2d_quantization = with_2d_quantization


class NVFP4Quantizer:
    """Named as the class it stands for."""

    with_2d_quantization = True
    with_rht = False


class GroupedTensor:
    """Flat fields of all experts, and members that are views of them."""

    _with_gemm_swizzled_scales = False
    device = torch.device("cpu")

    def __init__(self, member: type, format: BlockScaledFormat, masters: torch.Tensor) -> None:
        self.shape = masters.shape
        self.quantizer = {
            Float8BlockwiseQTensor: lambda: Float8BlockQuantizer(
                format.scale_encoding == "power_of_two"
            ),
            MXFP8Tensor: lambda: MXFP8Quantizer(format.is_2d),
            NVFP4Tensor: NVFP4Quantizer,
        }[member]()
        self.quantized_tensors = [member(format, master) for master in masters]
        self._high_precision_init_val = masters.bfloat16()
        fields = {
            "rowwise_data": "_rowwise_data",
            "columnwise_data": "_columnwise_data",
            "scale_inv": "_rowwise_scale_inv",
            "columnwise_scale_inv": "_columnwise_scale_inv",
        }
        if format.has_global_amax:
            fields |= {"amax": "_amax_rowwise", "columnwise_amax": "_amax_columnwise"}
        for ours, theirs in fields.items():
            stacked = torch.stack([getattr(one, theirs) for one in self.quantized_tensors])
            setattr(self, ours, stacked.reshape(-1))
            for one, view in zip(self.quantized_tensors, stacked, strict=True):
                setattr(one, theirs, view)


@cache
def _tensor_class(stand_in: type) -> Any:
    own = {name: value for name, value in vars(stand_in).items() if not name.startswith("__")}
    own["__torch_function__"] = torch._C._disabled_torch_function_impl
    return type(stand_in.__name__, (torch.Tensor,), own)


def as_parameter(stand_in: StandIn) -> torch.nn.Parameter:
    """Return a parameter with the fields of a stand-in, and a class of the same name."""
    weight = as_tensor(stand_in, stand_in._high_precision_init_val.clone())
    weight._is_param = True
    return weight.requires_grad_()


def as_tensor(stand_in: Any, values: torch.Tensor | None = None) -> Any:
    """Return a tensor with the fields of a stand-in, and a class of the same name.

    Args:
        stand_in: of a weight.
        values: what it is to its base class; zeros of its shape by default.
    """
    if values is None:
        values = torch.zeros(stand_in.shape, dtype=torch.bfloat16)
    weight = values.as_subclass(_tensor_class(type(stand_in)))
    vars(weight).update({name: one for name, one in vars(stand_in).items() if name != "shape"})
    return weight


def padded_scale(quantized, direction) -> torch.Tensor:
    """Return the scales of one expert as Transformer Engine keeps them, by indexing alone."""
    format, (_, rows, cols) = quantized.format, quantized.shape
    stored = torch.zeros(
        format.storage_scale_shape(rows, cols, direction), dtype=format.scale_dtype
    )
    scale = quantized.rowwise_scale[0]
    if direction == "columnwise" and not format.is_2d:
        scale = quantized.columnwise_scale[0]
    elif direction == "columnwise" and format.transposes("columnwise"):
        scale = scale.t()
    down, across = format.storage_scale_repeat(direction)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            stored[i * down : (i + 1) * down, j * across : (j + 1) * across] = scale[i, j]
    return stored
