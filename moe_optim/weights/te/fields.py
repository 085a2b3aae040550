"""Attribute names and properties of Transformer Engine (2.20) quantized weights.

Classes are identified by name, so Transformer Engine need not be imported.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from moe_optim.errors import StateError
from moe_optim.formats import (
    DIRECTIONS,
    FP8_BLOCK,
    FP8_BLOCK_FP32,
    MXFP8,
    MXFP8_2D,
    NVFP4,
    BlockScaledFormat,
    Direction,
)
from moe_optim.kernels.dequantize import dequantize
from moe_optim.places import has_memory
from moe_optim.weights.grouped_weight import GroupedWeight

ONE: Mapping[str, str] = MappingProxyType(
    {
        "rowwise_data": "_rowwise_data",
        "columnwise_data": "_columnwise_data",
        "rowwise_scale": "_rowwise_scale_inv",
        "columnwise_scale": "_columnwise_scale_inv",
        "rowwise_amax": "_amax_rowwise",
        "columnwise_amax": "_amax_columnwise",
    }
)
"""Attributes of a tensor [R, C], an expert or a dense weight, by what they hold."""
GROUPED: Mapping[str, str] = MappingProxyType(
    {
        "rowwise_data": "rowwise_data",
        "columnwise_data": "columnwise_data",
        "rowwise_scale": "scale_inv",
        "columnwise_scale": "columnwise_scale_inv",
        "rowwise_amax": "amax",
        "columnwise_amax": "columnwise_amax",
    }
)
"""Those of a ``GroupedTensor`` [E, R, C], flat; members are tensors [R, C] over its memory."""


def names_of(format: BlockScaledFormat) -> tuple[str, ...]:
    """Return the names, in :data:`ONE` and :data:`GROUPED`, of the tensors that a format needs."""
    kinds = ("data", "scale", "amax") if format.has_global_amax else ("data", "scale")
    return tuple(f"{direction}_{kind}" for direction in DIRECTIONS for kind in kinds)


SWIZZLED = "_with_gemm_swizzled_scales"
"""Attribute that marks a tensor or a group with GEMM-swizzled scales."""

TENSORWISE = "tensorwise"
"""Megatron's name of FP8 with per-tensor scaling, which is not a block-scaled format."""

_PLAIN = (Tensor, torch.nn.Parameter)
_FORMATS: Mapping[str, tuple[BlockScaledFormat, ...]] = MappingProxyType(
    {
        "Float8BlockwiseQTensor": (FP8_BLOCK, FP8_BLOCK_FP32),
        "MXFP8Tensor": (MXFP8, MXFP8_2D),
        "NVFP4Tensor": (NVFP4,),
        "Float8BlockQuantizer": (FP8_BLOCK, FP8_BLOCK_FP32),
        "MXFP8Quantizer": (MXFP8, MXFP8_2D),
        "NVFP4Quantizer": (NVFP4,),
    }
)
"""Formats by class of the tensor, or of the quantizer of a ``GroupedTensor``."""


def te_formats_of(param: Any) -> tuple[BlockScaledFormat, ...]:
    """Return the formats that a quantized Transformer Engine weight can hold, else none.

    The quantizer of the weight decides on the scales of FP8 blocks.
    """
    if type(param) in _PLAIN:
        return ()
    deciding = quantizer_of(param) if is_grouped(param) else param
    names = [cls.__name__ for cls in type(deciding).__mro__]
    formats = next((_FORMATS[name] for name in names if name in _FORMATS), ())
    if FP8_BLOCK not in formats:
        return formats
    return (FP8_BLOCK_FP32 if False in _values_of(param, "force_pow_2_scales") else FP8_BLOCK,)


def is_tensorwise(param: Any) -> bool:
    """Return whether a Transformer Engine weight is FP8 with current per-tensor scaling.

    Megatron quantizes such weights from our masters and gathers them in its own buffers. Steps do
    not write bf16 shards of them, since every shard needs the scale of the whole weight. Weights
    with delayed scaling are not included.
    """
    is_of_class = _is_a(param, "Float8Tensor")
    return is_of_class and _is_a(quantizer_of(param), "Float8CurrentScalingQuantizer")


def is_quantized(param: Any) -> bool:
    """Return whether a tensor is a quantized weight, to be read with :func:`read_values`."""
    return type(param) not in _PLAIN and (bool(te_formats_of(param)) or is_tensorwise(param))


def is_grouped(param: Any) -> bool:
    """Return whether a weight is a ``GroupedTensor``."""
    return _is_a(param, "GroupedTensor")


def quantizer_of(weight: Any) -> Any:
    """Return the quantizer of a weight, without a ``DebugQuantizer`` around it."""
    quantizer = getattr(weight, "quantizer", None) or getattr(weight, "_quantizer", None)
    return getattr(quantizer, "parent_quantizer", None) or quantizer


def _is_a(value: Any, name: str) -> bool:
    return name in [cls.__name__ for cls in type(value).__mro__]


# Reading values


def data_of(param: Any) -> list[Tensor]:
    """Return the byte tensors of a tensorwise weight, not copies: data, and any transpose."""
    found = (getattr(param, name, None) for name in ("_data", "_transpose"))
    return [data for data in found if data is not None]


def require_memory(where: str, weight: Any) -> None:
    """Raise StateError, starting with ``where``, if a weight is offloaded, without reading it."""
    if type(weight) in _PLAIN:
        found = [weight]
    elif is_tensorwise(weight):
        found = data_of(weight)
    else:
        names = GROUPED if is_grouped(weight) else ONE
        found = [getattr(weight, names["rowwise_data"], None)]
    if not all(has_memory(data) for data in found if data is not None):
        raise StateError(
            f"{where}: expected the values of the weight, got none: they are offloaded. Call "
            "reload_from_cpu() on the buffers of the DDP module first."
        )


def used_scales(
    stored: Tensor, format: BlockScaledFormat, shape: tuple[int, int, int], direction: Direction
) -> Tensor:
    """Return a view of the scales of a weight [E, R, C], without padding and repeats.

    ``stored`` are [E, ...] as GEMMs read them. Columnwise 2-D scales that are not transposed use
    the rowwise layout.
    """
    _, down, across = format.scale_shape(shape, direction)
    if direction == "columnwise" and format.columnwise_copy == "shared":
        down, across = across, down
    repeat_down, repeat_across = format.storage_scale_repeat(direction)
    return stored[:, : down * repeat_down : repeat_down, : across * repeat_across : repeat_across]


def read_values(weight: Any) -> Tensor:
    """Return the rowwise values of a weight, or of a group member, in bf16, newly allocated.

    The weight is not modified; for block formats no Transformer Engine kernel runs. Raises
    StateError if swizzled, offloaded or stale; see also :func:`refuse_foreign_bytes`.
    """
    name = type(weight).__name__
    if is_tensorwise(weight):
        require_memory(name, weight)
        return cast(Tensor, weight.dequantize(dtype=torch.bfloat16))
    storage = getattr(weight, "quantized_storage", None) or getattr(weight, "group_storage", None)
    if storage is not None:
        storage.require_fresh()
        name = storage.name
    require_memory(name, weight)
    if getattr(weight, SWIZZLED, False):
        raise StateError(
            f"{name}: expected plain scales, got scales in GEMM order (swizzled). Call "
            "start_param_sync(force_sync=True) on the DDP module after the next step, which "
            "restores plain order, before reading values."
        )
    formats = te_formats_of(weight)
    refuse_foreign_bytes(weight, formats, name)
    fields = GROUPED if is_grouped(weight) else ONE
    format = formats[0]  # rowwise reads are the same for square and 1-D blocks
    experts, rows, cols = shape = tuple(weight.shape) if fields is GROUPED else (1, *weight.shape)
    stored = getattr(weight, fields["rowwise_scale"])
    stored = stored.view(experts, *format.storage_scale_shape(rows, cols, "rowwise"))
    amax = getattr(weight, fields["rowwise_amax"]).view(-1) if format.has_global_amax else None
    values = dequantize(
        getattr(weight, fields["rowwise_data"]).view(format.data_shape(shape, "rowwise")),
        used_scales(stored, format, shape, "rowwise"),
        format,
        "rowwise",
        global_amax=amax,
    )
    return values.view(weight.shape)


def plain_values(value: Any) -> Any:
    """Return the dequantized rowwise values of a quantized weight; any other value unchanged."""
    if isinstance(value, GroupedWeight):
        return value.dequantize()
    return read_values(value) if is_quantized(value) else value


# Unsupported properties

_PROPERTIES: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "block_len": (128, "blocks of {}"),
        "amax_epsilon": (0.0, "an amax of {} at least (amax_epsilon)"),
        "stochastic_rounding": (False, "stochastic rounding"),
        "with_rht": (False, "a Hadamard transform"),
        "with_amax_reduction": (False, "an amax of several ranks (with_amax_reduction)"),
        "amax_reduction_group": (None, "an amax of several ranks (amax_reduction_group)"),
        "row_scaled_nvfp4": (False, "an amax per row"),
        "nvfp4_use_4over6": (False, "four-over-six blocks"),
        "nvfp4_e4m3_max": (448, "block scales up to {}"),
    }
)
"""Supported value of each property of a weight or its quantizer, and the meaning of others."""
_SCALES: Mapping[bool, str] = MappingProxyType(
    {True: "scales that are powers of two", False: "scales of any mantissa"}
)
"""Scales of FP8 blocks by ``force_pow_2_scales``."""


def refuse_foreign_bytes(weight: Any, formats: Sequence[BlockScaledFormat], name: str) -> None:
    """Raise StateError unless ``formats`` describe how a weight is quantized, now and next time.

    The message lists all unsupported properties. Directions and the order of scales are not
    checked: Transformer Engine changes them on demand.
    """
    found = []
    if (element := foreign_element(weight)) is not None:
        found.append(f"elements of {element}")
    squares = _have_square_blocks(weight, formats[0])
    if all(one.is_2d for one in formats) and False in squares:
        found.append("blocks of one row (1-D)")
    if not any(one.is_2d for one in formats) and True in squares:
        found.append("square blocks (2-D)")
    own_scales = {one.scale_encoding != "fp32" for one in formats}
    scales = {*_values_of(weight, "force_pow_2_scales")} - own_scales
    found += [f"{_SCALES[one]} (force_pow_2_scales={one})" for one in scales]
    if (dtype := getattr(weight, "dtype", torch.bfloat16)) != torch.bfloat16:
        found.append(f"values of {dtype}")
    for field, (own, meaning) in _PROPERTIES.items():
        others = [value for value in _values_of(weight, field) if value != own]
        found += [meaning.format(value) for value in others[:1]]
    if found:
        raise StateError(
            f"{name} {list(weight.shape)}: expected {' or '.join(one.name for one in formats)} as "
            f"Transformer Engine's default recipe makes it, got {', '.join(found)}. Build the "
            "model with moe_optim installed and that recipe, or train these weights with stock: "
            "drop --fp8-param-gather or --fp4-param-gather, or --use-moe-grouped-optim."
        )


def foreign_element(weight: Any) -> str | None:
    """Return the element dtype of a weight if it is neither E4M3 nor E2M1, such as E5M2."""
    dtypes = [*_values_of(weight, "fp8_dtype"), *_values_of(weight, "fp4_dtype")]
    dtypes += [getattr(quantizer_of(weight), "dtype", None)]
    names = [getattr(dtype, "name", None) for dtype in dtypes]
    return next((one for one in names if one not in (None, "kFloat8E4M3", "kFloat4E2M1")), None)


def _have_square_blocks(weight: Any, format: BlockScaledFormat) -> set[bool]:
    """Return whether blocks are square as weight and quantizer report: none, one, or both."""
    said = {*_values_of(weight, "is_2D_scaled"), *_values_of(weight, "with_2d_quantization")}
    said |= {dimensions == 2 for dimensions in _values_of(weight, "block_scaling_dim")}
    if not said and format.name == "mxfp8_2d":
        return {quantizer_of(weight) is None}  # MXFP8 of Transformer Engine 2.18 is 1-D only
    return said


def _values_of(weight: Any, field: str) -> list[Any]:
    """Return the values of a property in a weight and its quantizer, which may differ."""
    places = ((weight, f"_{field}"), (weight, field), (quantizer_of(weight), field))
    values = [getattr(place, called, None) for place, called in places]
    return [value for value in values if value is not None]
