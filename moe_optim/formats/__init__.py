"""Block-scaled formats as values, and every property and shape that follows from a format.

A *buffer* is one tensor of a quantized weight (data or scales, rowwise or columnwise). Shapes are
*logical*: unpadded, one scale per block. For padded and repeated scales, see
:meth:`BlockScaledFormat.storage_scale_shape`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from moe_optim.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# torch takes seconds to import; planning counts bytes without it.

Direction = Literal["rowwise", "columnwise"]
"""Block direction: ``rowwise`` for the forward GEMM, ``columnwise`` for the dgrad."""
Element = Literal["e4m3", "e2m1", "int4"]
"""Element encoding: four exponent and three mantissa bits, two and one, or integers -8 to 7."""
ScaleEncoding = Literal["e8m0", "e4m3", "power_of_two", "fp32", "bf16"]
"""Scale encoding, see :attr:`BlockScaledFormat.scale_encoding`."""
ColumnwiseCopy = Literal["quantized", "shared", "transposed", "none"]
"""Origin of the columnwise buffer, see :attr:`BlockScaledFormat.columnwise_copy`."""

DIRECTIONS: tuple[Direction, ...] = ("rowwise", "columnwise")
"""Both directions, in the order in which buffers are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScaledFormat:
    """Quantized format: low-precision elements of [R, C], and one scale per block. Hashable."""

    name: str
    """Name in recipes and checkpoints."""
    element: Element
    """Element encoding. ``e2m1`` and ``int4`` pack two elements per byte, low nibble first; nibble
    n of ``int4`` is n - 8."""
    data_max: float
    """Largest finite magnitude that scales bring an element to."""
    rowwise_block: tuple[int, int]
    """Rows and columns that share one rowwise scale."""
    columnwise_copy: ColumnwiseCopy
    """``quantized``: from the master with its own scales. ``shared``: the rowwise bytes themselves.
    ``transposed``: the rowwise elements and scales, transposed to [C, R]. ``none``: row-only
    storage; both GEMMs read the rowwise values, as inference engines do."""
    scale_encoding: ScaleEncoding
    """``e8m0`` and ``e4m3`` are bytes, ``power_of_two`` and ``fp32`` are fp32."""
    dimension_multiple: int
    """Divisor of columns, and of rows unless storage is row-only; 1 if edge blocks may be
    partial."""
    has_global_amax: bool = False
    """Whether every expert has an fp32 amax besides its block scales."""

    @property
    def element_bits(self) -> int:
        """Bits per element."""
        return 8 if self.element == "e4m3" else 4

    @property
    def elements_per_byte(self) -> int:
        """Elements per data byte."""
        return 8 // self.element_bits

    @property
    def scale_itemsize(self) -> int:
        """Bytes per scale."""
        return {"e8m0": 1, "e4m3": 1, "bf16": 2, "power_of_two": 4, "fp32": 4}[self.scale_encoding]

    @property
    def scale_dtype(self) -> "torch.dtype":
        """Dtype of the scale buffers: uint8 codes, bf16 or fp32."""
        import torch

        return {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[self.scale_itemsize]

    @property
    def is_2d(self) -> bool:
        """Whether one square block serves both directions."""
        return self.rowwise_block[0] == self.rowwise_block[1]

    @property
    def is_row_only(self) -> bool:
        """Whether only the rowwise direction is stored, and GEMMs of both directions read it."""
        return self.columnwise_copy == "none"

    @property
    def directions_agree(self) -> bool:
        """Whether GEMMs of both directions read the same values, as those of one copy would.

        Columnwise bytes are then the rowwise ones, their transpose, or not stored.
        """
        return self.columnwise_copy != "quantized"

    @property
    def block_length(self) -> int:
        """Elements of a row, or of a column, that share one scale."""
        return self.rowwise_block[1]

    @property
    def block_row_height(self) -> int:
        """Rows of a *block row*, the lowest strip of whole blocks of all stored directions.

        The last block row of a weight may be lower if edge blocks may be partial.
        """
        return 1 if self.is_row_only else self.block_length

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Directions that are stored."""
        return ("rowwise",) if self.is_row_only else DIRECTIONS

    @property
    def gathered_directions(self) -> tuple[Direction, ...]:
        """Directions that are gathered; the other one, if stored, is derived from them exactly."""
        return DIRECTIONS if self.columnwise_copy == "quantized" else ("rowwise",)

    @property
    def data_bytes_per_element(self) -> Fraction:
        """Bytes of one data buffer per logical element."""
        return Fraction(1, self.elements_per_byte)

    @property
    def scale_bytes_per_element(self) -> Fraction:
        """Bytes of one scale buffer per logical element, ignoring partial edge blocks."""
        rows, cols = self.rowwise_block
        return Fraction(self.scale_itemsize, rows * cols)

    @property
    def gathered_bytes_per_element(self) -> Fraction:
        """Bytes gathered per parameter: data and scales of all gathered directions.

        Excludes the 4 bytes per expert of a global amax.
        """
        buffer = self.data_bytes_per_element + self.scale_bytes_per_element
        return buffer * len(self.gathered_directions)

    def block(self, direction: Direction) -> tuple[int, int]:
        """Return the rows and columns of a [R, C] weight that share one scale of ``direction``."""
        rows, cols = self.rowwise_block
        return (cols, rows) if direction == "columnwise" and not self.is_row_only else (rows, cols)

    def transposes(self, direction: Direction) -> bool:
        """Return whether the data buffer of ``direction`` is stored as [C, R]."""
        return direction == "columnwise" and self.columnwise_copy == "transposed"

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Fields of ``QuantizedWeight`` with their own buffer."""
        names = ["rowwise_data", "rowwise_scale"]
        if self.columnwise_copy in ("quantized", "transposed"):
            names.append("columnwise_data")
        if not self.is_row_only:
            names.append("columnwise_scale")
        if self.has_global_amax:
            names.append("global_amax")
        return tuple(names)

    def fits(self, rows: int, cols: int) -> bool:
        """Return whether a weight [R, C] has whole blocks wherever the format needs them.

        Args:
            rows: number of rows, R.
            cols: number of columns, C.
        """
        multiple = self.dimension_multiple
        return cols % multiple == 0 and (self.is_row_only or rows % multiple == 0)

    def check_shape(self, shape: Sequence[int], name: str = "weight") -> tuple[int, int, int]:
        """Return ``shape`` as (experts, rows, cols), or raise LayoutError if it is unsupported.

        ``name`` is the name of the weight in the error.
        """
        experts, rows, cols = check_stack(shape, name)
        multiple = self.dimension_multiple
        if not self.fits(rows, cols):
            what = "columns" if self.is_row_only else "rows and columns"
            raise LayoutError(
                f"{name}: {self.name} needs {what} divisible by {multiple}, got "
                f"[{rows}, {cols}]. Pad moe_ffn_hidden_size or hidden_size to a multiple of "
                f"{multiple}, or keep this weight in bf16."
            )
        return experts, rows, cols

    def data_shape(self, shape: Sequence[int], direction: Direction) -> tuple[int, int, int]:
        """Return the shape in bytes of the data buffer of ``direction``, for logical ``shape``."""
        experts, rows, cols = shape
        if self.transposes(direction):
            rows, cols = cols, rows
        return experts, rows, cols // self.elements_per_byte

    def scale_shape(self, shape: Sequence[int], direction: Direction) -> tuple[int, int, int]:
        """Return the logical shape of the scale buffer of ``direction``, for logical ``shape``.

        For 2-D formats, ``columnwise`` is the transpose of the rowwise scales, even if the data is
        shared rather than transposed.
        """
        experts, rows, cols = shape
        block_rows, block_cols = self.block(direction)
        scale_rows, scale_cols = _ceil_div(rows, block_rows), _ceil_div(cols, block_cols)
        if self.is_2d and direction == "columnwise":
            scale_rows, scale_cols = scale_cols, scale_rows
        return experts, scale_rows, scale_cols

    def storage_scale_shape(self, rows: int, cols: int, direction: Direction) -> tuple[int, int]:
        """Return the shape in which Transformer Engine stores the scales of one [R, C] weight.

        Padded and unswizzled; ``rows`` and ``cols`` are logical. A storage scale of ``direction``
        is at the position of its logical scale times :meth:`storage_scale_repeat`; the rest is
        padding and must be zero.
        """
        if self.transposes(direction):
            rows, cols = cols, rows
        if self.scale_itemsize == 4:  # one fp32 per block, only the last dim is padded
            block_rows, block_cols = self.rowwise_block
            return _ceil_div(rows, block_rows), round_up(_ceil_div(cols, block_cols), 4)
        # GEMMs that read byte scales need one for each line of a 1-D block.
        length = self.block_length
        if direction == "columnwise" and not self.transposes(direction):
            return round_up(_ceil_div(rows, length), 4), round_up(cols, 128)
        return round_up(rows, 128), round_up(_ceil_div(cols, length), 4)

    def storage_scale_repeat(self, direction: Direction) -> tuple[int, int]:
        """Return how many storage rows and columns one block scale of ``direction`` fills.

        The axes are those of the data buffer as stored. For ``mxfp8_2d`` columnwise these are the
        axes of the *rowwise* scales, because its data is not transposed.
        """
        length = self.block_length
        if not self.is_2d or self.scale_itemsize == 4:
            return 1, 1
        if direction == "columnwise" and not self.transposes(direction):
            return 1, length
        return length, 1


MXFP8 = BlockScaledFormat(
    name="mxfp8",
    element="e4m3",
    data_max=448.0,
    rowwise_block=(1, 32),
    columnwise_copy="quantized",
    scale_encoding="e8m0",
    dimension_multiple=32,
)
"""E4M3 with one E8M0 scale per 32 elements of a row, and again per 32 of a column."""
MXFP8_2D = BlockScaledFormat(
    name="mxfp8_2d",
    element="e4m3",
    data_max=448.0,
    rowwise_block=(32, 32),
    columnwise_copy="shared",
    scale_encoding="e8m0",
    dimension_multiple=32,
)
"""E4M3 with one E8M0 scale per 32x32 elements; both directions read the same bytes."""
NVFP4 = BlockScaledFormat(
    name="nvfp4",
    element="e2m1",
    data_max=6.0,
    rowwise_block=(16, 16),
    columnwise_copy="transposed",
    scale_encoding="e4m3",
    dimension_multiple=16,
    has_global_amax=True,
)
"""E2M1, two per byte, with one E4M3 scale per 16x16 elements and one fp32 amax per expert."""
FP8_BLOCK = BlockScaledFormat(
    name="fp8_block",
    element="e4m3",
    data_max=448.0,
    rowwise_block=(128, 128),
    columnwise_copy="transposed",
    scale_encoding="power_of_two",
    dimension_multiple=1,
)
"""E4M3 with one fp32 power-of-two scale per 128x128 elements."""
FP8_BLOCK_FP32 = replace(FP8_BLOCK, name="fp8_block_fp32", scale_encoding="fp32")
"""E4M3 with one fp32 scale per 128x128 elements, of any mantissa."""
MXFP8_ROWS = replace(MXFP8, name="mxfp8_rows", columnwise_copy="none")
"""The rowwise half of MXFP8."""
MXFP4 = replace(MXFP8_ROWS, name="mxfp4", element="e2m1", data_max=6.0)
"""E2M1, two per byte, with one E8M0 scale per 32 elements of a row."""
NVFP4_ROWS = replace(NVFP4, name="nvfp4_rows", rowwise_block=(1, 16), columnwise_copy="none")
"""E2M1, two per byte, with one E4M3 scale per 16 elements of a row and one fp32 amax per expert."""
INT4 = BlockScaledFormat(
    name="int4",
    element="int4",
    data_max=7.0,
    rowwise_block=(1, 32),
    columnwise_copy="none",
    scale_encoding="bf16",
    dimension_multiple=32,
)
"""Integers -8 to 7, two per byte, with one bf16 scale per 32 elements of a row."""
INT4_G128 = replace(INT4, name="int4_g128", rowwise_block=(1, 128), dimension_multiple=128)
"""As ``int4``, with one scale per 128 elements of a row."""

FORMATS: Mapping[str, BlockScaledFormat] = MappingProxyType(
    {
        format.name: format
        for format in (
            *(MXFP8, MXFP8_2D, NVFP4, FP8_BLOCK, FP8_BLOCK_FP32),
            *(MXFP8_ROWS, MXFP4, NVFP4_ROWS, INT4, INT4_G128),
        )
    }
)
"""Every block-scaled format by name. ``bf16`` is not included: it has neither blocks nor scales."""


def get_format(name: str) -> BlockScaledFormat:
    """Return the block-scaled format called ``name``.

    Raises:
        ConfigError: unknown name; the message lists the formats.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"format: expected one of {', '.join(FORMATS)}, got '{name}'. Name a block-scaled "
            f"format; 'bf16' has no blocks and no descriptor."
        )
    return FORMATS[name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeight:
    """Buffers of a stack of quantized experts, at their logical shapes.

    Tensors are stored by reference and may be views with any strides, such as into another
    library's storage. Data buffers are uint8, even for FP8 elements.
    """

    format: BlockScaledFormat
    """Format of the bytes."""
    shape: tuple[int, int, int]
    """Logical (experts, rows, cols)."""
    rowwise_data: "Tensor"
    """Rowwise data, [E, R, C / elements_per_byte] uint8."""
    rowwise_scale: "Tensor"
    """Rowwise dequantization factors, of ``format.scale_shape`` and ``format.scale_dtype``."""
    columnwise_data: "Tensor"
    """Columnwise data, uint8, [E, R, C] or transposed; ``rowwise_data`` if shared or row-only."""
    columnwise_scale: "Tensor"
    """Columnwise dequantization factors, of ``format.scale_shape`` and ``format.scale_dtype``;
    ``rowwise_scale`` if storage is row-only."""
    global_amax: "Tensor | None" = None
    """Amax per expert, [E] fp32, for formats with a global amax, else None."""

    def __post_init__(self) -> None:
        """Check every buffer against the format.

        Raises:
            LayoutError: a buffer has the wrong shape, dtype or device, is missing or superfluous,
                or does not share memory as required.
        """
        self.format.check_shape(self.shape, name="QuantizedWeight.shape")
        ways = [f"{way}_{kind}" for way in self.format.directions for kind in ("data", "scale")]
        for name in (*ways, *["global_amax"] * self.format.has_global_amax):
            self._check_buffer(name)
        if self.global_amax is not None and not self.format.has_global_amax:
            raise LayoutError(
                f"QuantizedWeight.global_amax: {self.format.name} has none, got a tensor. "
                f"Leave it out."
            )
        for kind in ("data", "scale"):
            rowwise, columnwise = f"rowwise_{kind}", f"columnwise_{kind}"
            if columnwise not in self.format.buffer_names and not _same_memory(
                getattr(self, rowwise), getattr(self, columnwise)
            ):
                raise LayoutError(
                    f"QuantizedWeight.{columnwise}: {self.format.name} has one {kind} buffer for "
                    f"both directions, got a second one. Pass {rowwise} for both."
                )

    @classmethod
    def empty(
        cls,
        format: BlockScaledFormat,
        shape: Sequence[int],
        *,
        device: "torch.device | str | None" = None,
        name: str = "weight",
    ) -> "QuantizedWeight":
        """Allocate the buffers of a weight, contiguous and uninitialized.

        Args:
            format: format of the buffers.
            shape: logical [E, R, C].
            device: device of the buffers; torch's default if not given.
            name: name of the weight, for errors.

        Raises:
            LayoutError: ``shape`` does not fit the format.
        """
        import torch

        checked = format.check_shape(shape, name)

        buffers = []
        for field in format.buffer_names:
            size, dtype = _buffer_layout(format, checked, field)
            buffers.append(torch.empty(size, dtype=dtype, device=device))
        return cls.of_buffers(format, checked, buffers)

    @classmethod
    def of_buffers(
        cls, format: BlockScaledFormat, shape: Sequence[int], buffers: "Iterable[Tensor]"
    ) -> "QuantizedWeight":
        """Return a record of existing ``buffers``, in the order of ``format.buffer_names``.

        Nothing is copied. ``shape`` is the logical [E, R, C] of the weight in ``format``; shapes
        and dtypes of the buffers are those of the fields.
        """
        fields = dict(zip(format.buffer_names, buffers, strict=True))
        fields.setdefault("columnwise_data", fields["rowwise_data"])
        fields.setdefault("columnwise_scale", fields["rowwise_scale"])
        experts, rows, cols = shape
        return cls(format=format, shape=(experts, rows, cols), **fields)

    def data(self, direction: Direction) -> "Tensor":
        """Return the data buffer of ``direction``, not a copy: uint8, of ``format.data_shape``."""
        _check_direction(direction)
        return self.rowwise_data if direction == "rowwise" else self.columnwise_data

    def scale(self, direction: Direction) -> "Tensor":
        """Return the scale buffer of ``direction``, not a copy.

        Its shape is ``format.scale_shape``, its dtype ``format.scale_dtype``.
        """
        _check_direction(direction)
        return self.rowwise_scale if direction == "rowwise" else self.columnwise_scale

    def buffers(self) -> "dict[str, Tensor]":
        """Return every distinct buffer by field name, not copies; shared data appears once.

        Shapes and dtypes are those of the fields.
        """
        return {name: getattr(self, name) for name in self.format.buffer_names}

    def gathered_buffers(self) -> "dict[str, Tensor]":
        """Return the buffers to gather, by field name, not copies.

        Shapes and dtypes are those of the fields. The other buffers are derived from these.
        """
        kinds = [
            f"{way}_{kind}" for way in self.format.gathered_directions for kind in ("data", "scale")
        ]
        gathered = {*kinds, "global_amax"}
        return {name: buffer for name, buffer in self.buffers().items() if name in gathered}

    def _check_buffer(self, field: str) -> None:
        shape, dtype = _buffer_layout(self.format, self.shape, field)
        buffer = getattr(self, field)
        where = f"QuantizedWeight.{field}"
        if buffer is None:
            raise LayoutError(f"{where}: {self.format.name} needs {list(shape)} {dtype}, got None.")
        if tuple(buffer.shape) != shape or buffer.dtype != dtype:
            raise LayoutError(
                f"{where}: {self.format.name} of shape {list(self.shape)} needs {list(shape)} "
                f"{dtype}, got {list(buffer.shape)} {buffer.dtype}."
            )
        if buffer.device != self.rowwise_data.device:
            raise LayoutError(
                f"{where}: expected the device of rowwise_data, {self.rowwise_data.device}, got "
                f"{buffer.device}."
            )


def _buffer_layout(
    format: BlockScaledFormat, shape: tuple[int, int, int], field: str
) -> "tuple[tuple[int, ...], torch.dtype]":
    """Return the shape and the dtype of a field of ``QuantizedWeight``."""
    import torch

    direction: Direction = "columnwise" if field.startswith("columnwise") else "rowwise"
    if field == "global_amax":
        return shape[:1], torch.float32
    if field.endswith("_data"):
        return format.data_shape(shape, direction), torch.uint8
    return format.scale_shape(shape, direction), format.scale_dtype


def _same_memory(a: "Tensor", b: "Tensor") -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def check_stack(shape: Sequence[int], name: str) -> tuple[int, int, int]:
    """Return ``shape`` as (experts, rows, cols), or raise LayoutError if it is another kind.

    ``name`` is the name of the weight in the error.
    """
    if len(shape) != 3 or min(shape) < 0:
        raise LayoutError(
            f"{name}: expected a shape [experts, rows, cols], got {list(shape)}. View one weight "
            "as [1, rows, cols]."
        )
    experts, rows, cols = shape
    return experts, rows, cols


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ConfigError(
            f"direction: expected {' or '.join(DIRECTIONS)}, got '{direction}'. Write rowwise for "
            "the forward GEMM."
        )


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return _ceil_div(value, multiple) * multiple
