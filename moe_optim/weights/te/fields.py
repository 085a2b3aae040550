"""What Transformer Engine (2.20) calls the tensors of its quantized weights, and their values."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.formats import (
    DIRECTIONS,
    FP8_BLOCK,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    BlockScaledFormat,
    Direction,
)
from moe_optim.formats.reference import dequantize_bf16
from moe_optim.places import has_memory
from moe_optim.weights.te.properties import refuse_foreign_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """What a tensor class calls its tensors, by what we call them."""

    rowwise_data: str
    columnwise_data: str
    rowwise_scale: str
    columnwise_scale: str
    rowwise_amax: str
    columnwise_amax: str

    def names(self, format: BlockScaledFormat) -> tuple[str, ...]:
        """Return our names of the tensors that a format needs."""
        kinds = ("data", "scale", "amax") if format.has_global_amax else ("data", "scale")
        return tuple(f"{direction}_{kind}" for direction in DIRECTIONS for kind in kinds)


ONE = Fields(
    rowwise_data="_rowwise_data",
    columnwise_data="_columnwise_data",
    rowwise_scale="_rowwise_scale_inv",
    columnwise_scale="_columnwise_scale_inv",
    rowwise_amax="_amax_rowwise",
    columnwise_amax="_amax_columnwise",
)
"""Of a tensor [R, C]: an expert, or a dense weight."""
GROUPED = Fields(
    rowwise_data="rowwise_data",
    columnwise_data="columnwise_data",
    rowwise_scale="scale_inv",
    columnwise_scale="columnwise_scale_inv",
    rowwise_amax="amax",
    columnwise_amax="columnwise_amax",
)
"""Of a ``GroupedTensor`` [E, R, C], flat; its members are tensors [R, C] over the same memory."""

SWIZZLED = "_with_gemm_swizzled_scales"
"""Says of a tensor, or of a group, that scales lie in the order of products."""

TENSORWISE = "tensorwise"
"""What Megatron calls FP8 with one scale a weight, which is no format of ours."""

_FORMATS: Mapping[str, tuple[BlockScaledFormat, ...]] = MappingProxyType(
    {
        "Float8BlockwiseQTensor": (FP8_BLOCK,),
        "MXFP8Tensor": (MXFP8, MXFP8_2D),
        "NVFP4Tensor": (NVFP4,),
        "Float8BlockQuantizer": (FP8_BLOCK,),
        "MXFP8Quantizer": (MXFP8, MXFP8_2D),
        "NVFP4Quantizer": (NVFP4,),
    }
)
"""By class of the tensor, or of what quantizes a ``GroupedTensor``."""


def te_formats_of(param: Any) -> tuple[BlockScaledFormat, ...]:
    """Return the formats that a weight of Transformer Engine can hold, none for other tensors.

    Found by the names of classes, so that nothing has to be imported. A ``GroupedTensor`` in high
    precision has none.
    """
    deciding = param.quantizer if is_grouped(param) else param
    names = [cls.__name__ for cls in type(deciding).__mro__]
    return next((_FORMATS[name] for name in names if name in _FORMATS), ())


def has_scale_a_tensor(param: Any) -> bool:
    """Return whether a weight of Transformer Engine is FP8 with one scale, that of its last amax.

    Megatron's own buffers hold such weights. Delayed scaling, whose scale is older, makes others.
    """
    quantizer = getattr(param, "_quantizer", None)
    return _is_a(param, "Float8Tensor") and _is_a(quantizer, "Float8CurrentScalingQuantizer")


def data_of(param: Any) -> list[Tensor]:
    """Return what there is of the bytes of a weight that :func:`has_scale_a_tensor`, no copies.

    Its transpose is there from its first use on, where products want one.
    """
    found = (getattr(param, name, None) for name in ("_data", "_transpose"))
    return [data for data in found if data is not None]


def require_memory(where: str, weight: Any) -> None:
    """Check that the bytes of a weight are here, plain or quantized; no byte is read.

    A portable weight's storage tells by itself.

    Args:
        where: what the error begins with.
        weight: of any class.

    Raises:
        StateError: they are offloaded.
    """
    if type(weight) in (Tensor, torch.nn.Parameter):
        found = [weight]
    elif has_scale_a_tensor(weight):
        found = data_of(weight)
    else:
        names = GROUPED if is_grouped(weight) else ONE
        found = [getattr(weight, names.rowwise_data, None)]
    if not all(has_memory(data) for data in found if data is not None):
        raise StateError(
            f"{where}: expected the values of the weight, got none: they are offloaded. Call "
            "reload_from_cpu() on the buffers of the DDP module first."
        )


def is_quantized(param: Any) -> bool:
    """Return whether a tensor is a quantized weight, so that its values are :func:`read_values`."""
    return bool(te_formats_of(param)) or has_scale_a_tensor(param)


def is_grouped(param: Any) -> bool:
    """Return whether a weight is a ``GroupedTensor``."""
    return _is_a(param, "GroupedTensor")


def _is_a(value: Any, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(value).__mro__)


def used_scales(
    stored: Tensor, format: BlockScaledFormat, shape: tuple[int, int, int], direction: Direction
) -> Tensor:
    """Return the scales of a weight [E, R, C] without padding and repeats, a view.

    Args:
        stored: [E, ...] as products read them.
        format: of the weight.
        shape: of the weight.
        direction: of 2-D blocks that are not transposed, columnwise scales lie as rowwise ones do.
    """
    _, down, across = format.scale_shape(shape, direction)
    if direction == "columnwise" and format.columnwise_copy == "shared":
        down, across = across, down
    repeat_down, repeat_across = format.storage_scale_repeat(direction)
    return stored[:, : down * repeat_down : repeat_down, : across * repeat_across : repeat_across]


def read_values(weight: Any) -> Tensor:
    """Return the rowwise values of a weight in bf16, newly allocated.

    Nothing of the weight is changed, and of block formats none of its kernels runs. It may be a
    member of a group.

    Raises:
        StateError: the scales are not in plain order, or the bytes are offloaded, or the weight, or
            the group it is a member of, is known to be behind its masters; or see
            :func:`~moe_optim.weights.te.properties.refuse_foreign_bytes`.
    """
    if has_scale_a_tensor(weight):
        require_memory(type(weight).__name__, weight)
        return cast(Tensor, weight.dequantize(dtype=torch.bfloat16))
    storage = getattr(weight, "quantized_storage", None) or getattr(weight, "group_storage", None)
    if storage is not None:
        storage.require_fresh()
    require_memory(storage.name if storage else type(weight).__name__, weight)
    if getattr(weight, SWIZZLED, False):
        raise StateError(
            f"{storage.name if storage else type(weight).__name__}: expected plain scales, got "
            "scales in the order of products (swizzled). Call start_param_sync(force_sync=True) on "
            "the DDP module after the next step, which puts them back, before values are read."
        )
    formats = te_formats_of(weight)
    refuse_foreign_bytes(weight, formats, storage.name if storage else type(weight).__name__)
    fields = GROUPED if is_grouped(weight) else ONE
    format = formats[0]  # rows of square blocks are read as those of 1-D blocks
    experts, rows, cols = shape = tuple(weight.shape) if fields is GROUPED else (1, *weight.shape)
    stored = getattr(weight, fields.rowwise_scale)
    stored = stored.view(experts, *format.storage_scale_shape(rows, cols, "rowwise"))
    amax = getattr(weight, fields.rowwise_amax).view(-1) if format.has_global_amax else None
    values = dequantize_bf16(
        getattr(weight, fields.rowwise_data).view(format.data_shape(shape, "rowwise")),
        used_scales(stored, format, shape, "rowwise"),
        format,
        "rowwise",
        global_amax=amax,
    )
    return values.view(weight.shape)
