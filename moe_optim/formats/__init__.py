"""Block-scaled formats as values: every property and shape that follows from a format lives here.

A *buffer* is one tensor of a quantized weight (data or scales, rowwise or columnwise). Shapes are
*logical*: no padding and one scale a block. Padded and repeated scales belong to storage, see
:meth:`BlockScaledFormat.storage_scale_shape`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from moe_optim.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# torch takes seconds to import: a plan counts bytes without it.

Direction = Literal["rowwise", "columnwise"]
"""Direction of blocks: ``rowwise`` for the forward GEMM, ``columnwise`` for the dgrad."""
Element = Literal["e4m3", "e2m1"]
"""Encoding of an element: four exponent bits and three mantissa bits, or two and one."""
ScaleEncoding = Literal["e8m0", "e4m3", "power_of_two"]
"""Encoding of a scale, see :attr:`BlockScaledFormat.scale_encoding`."""
ColumnwiseCopy = Literal["quantized", "shared", "transposed"]
"""Origin of the columnwise buffer, see :attr:`BlockScaledFormat.columnwise_copy`."""

DIRECTIONS: tuple[Direction, ...] = ("rowwise", "columnwise")
"""Both, in the order in which buffers are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScaledFormat:
    """A quantized format: low-precision elements of [R, C], and one scale per block. Hashable."""

    name: str
    """Name in recipes and checkpoints."""
    element: Element
    """Encoding of one element; ``e2m1`` elements are packed two a byte, low nibble first."""
    data_max: float
    """Largest finite magnitude of an element."""
    rowwise_block: tuple[int, int]
    """Rows and columns that share one rowwise scale."""
    columnwise_copy: ColumnwiseCopy
    """``quantized``: from the master with its own scales. ``shared``: the rowwise bytes themselves.
    ``transposed``: the rowwise elements and scales, moved to [C, R]."""
    scale_encoding: ScaleEncoding
    """``e8m0`` and ``e4m3`` are bytes, ``power_of_two`` is fp32."""
    dimension_multiple: int
    """Rows and columns must both be multiples of this; 1 where edge blocks may be partial."""
    has_global_amax: bool = False
    """Whether every expert carries one fp32 amax next to its block scales."""

    @property
    def element_bits(self) -> int:
        """Bits of one element."""
        return 8 if self.element == "e4m3" else 4

    @property
    def elements_per_byte(self) -> int:
        """Elements packed into one data byte."""
        return 8 // self.element_bits

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale."""
        return 4 if self.scale_encoding == "power_of_two" else 1

    @property
    def scale_dtype(self) -> "torch.dtype":
        """Dtype of the scale buffers: uint8 codes, or fp32."""
        import torch

        return torch.float32 if self.scale_encoding == "power_of_two" else torch.uint8

    @property
    def is_2d(self) -> bool:
        """Whether one square block serves both directions."""
        return self.columnwise_copy != "quantized"

    @property
    def block_row_height(self) -> int:
        """Rows of a *block row*, the lowest strip of whole blocks of both directions.

        The last block row of a weight may be lower, where edge blocks may be partial.
        """
        return max(self.rowwise_block)

    @property
    def gathered_directions(self) -> tuple[Direction, ...]:
        """Directions that must travel; the other one is derived from these, exactly."""
        return ("rowwise",) if self.is_2d else DIRECTIONS

    @property
    def data_bytes_per_element(self) -> Fraction:
        """Bytes of one data buffer for each logical element."""
        return Fraction(1, self.elements_per_byte)

    @property
    def scale_bytes_per_element(self) -> Fraction:
        """Bytes of one scale buffer for each logical element, partial edge blocks aside."""
        rows, cols = self.rowwise_block
        return Fraction(self.scale_itemsize, rows * cols)

    @property
    def gathered_bytes_per_element(self) -> Fraction:
        """Bytes gathered for each parameter: data and scales of all directions that travel.

        The 4 bytes an expert of a global amax are not in it.
        """
        buffer = self.data_bytes_per_element + self.scale_bytes_per_element
        return buffer * len(self.gathered_directions)

    def block(self, direction: Direction) -> tuple[int, int]:
        """Return how many rows and columns of a [R, C] weight share one scale of ``direction``."""
        rows, cols = self.rowwise_block
        return (rows, cols) if direction == "rowwise" else (cols, rows)

    def transposes(self, direction: Direction) -> bool:
        """Return whether the data buffer of ``direction`` is stored as [C, R]."""
        return direction == "columnwise" and self.columnwise_copy == "transposed"

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Fields of ``QuantizedWeight`` that hold a buffer of their own."""
        names = ["rowwise_data", "rowwise_scale"]
        if self.columnwise_copy != "shared":
            names.append("columnwise_data")
        names.append("columnwise_scale")
        if self.has_global_amax:
            names.append("global_amax")
        return tuple(names)

    def check_shape(self, shape: Sequence[int], name: str = "weight") -> tuple[int, int, int]:
        """Return ``shape`` as (experts, rows, cols) if the format can hold it.

        Args:
            shape: logical [E, R, C].
            name: name of the weight in errors.

        Raises:
            LayoutError: not three sizes, a negative one, or rows or columns that are no multiple
                of ``dimension_multiple``.
        """
        if len(shape) != 3 or min(shape) < 0:
            raise LayoutError(
                f"{name}: expected a shape [experts, rows, cols], got {list(shape)}. "
                f"View one weight as [1, rows, cols]."
            )
        experts, rows, cols = shape
        multiple = self.dimension_multiple
        if rows % multiple or cols % multiple:
            raise LayoutError(
                f"{name}: {self.name} needs rows and columns divisible by {multiple}, got "
                f"[{rows}, {cols}]. Pad moe_ffn_hidden_size or hidden_size to a multiple of "
                f"{multiple}, or keep this weight in bf16."
            )
        return experts, rows, cols

    def data_shape(self, shape: Sequence[int], direction: Direction) -> tuple[int, int, int]:
        """Return the shape in bytes of the data buffer of ``direction``.

        Args:
            shape: logical [E, R, C] of the weight, which the format can hold.
            direction: direction of the buffer.
        """
        experts, rows, cols = shape
        if self.transposes(direction):
            rows, cols = cols, rows
        return experts, rows, cols // self.elements_per_byte

    def scale_shape(self, shape: Sequence[int], direction: Direction) -> tuple[int, int, int]:
        """Return the logical shape of the scale buffer: no padding, one scale a block.

        2-D formats give the transpose of their rowwise scales for ``columnwise``, also where the
        data itself is shared and not transposed.

        Args:
            shape: logical [E, R, C] of the weight, which the format can hold.
            direction: direction of the buffer.
        """
        experts, rows, cols = shape
        block_rows, block_cols = self.block(direction)
        scale_rows, scale_cols = _ceil_div(rows, block_rows), _ceil_div(cols, block_cols)
        if self.is_2d and direction == "columnwise":
            scale_rows, scale_cols = scale_cols, scale_rows
        return experts, scale_rows, scale_cols

    def storage_scale_shape(self, rows: int, cols: int, direction: Direction) -> tuple[int, int]:
        """Return the shape in which Transformer Engine keeps the scales of one [R, C] weight.

        Padded and unswizzled. A storage scale lies at the position of its logical scale times
        :meth:`storage_scale_repeat`; everything beyond is padding and must be zero.

        Args:
            rows: R, logical.
            cols: C, logical.
            direction: direction of the scales.
        """
        if self.transposes(direction):
            rows, cols = cols, rows
        if self.scale_encoding == "power_of_two":  # one fp32 a block, only the last dim is padded
            block_rows, block_cols = self.rowwise_block
            return _ceil_div(rows, block_rows), round_up(_ceil_div(cols, block_cols), 4)
        # The kernels that read byte scales want one for each line of a 1-D block.
        length = max(self.rowwise_block)
        if direction == "columnwise" and not self.transposes(direction):
            return round_up(_ceil_div(rows, length), 4), round_up(cols, 128)
        return round_up(rows, 128), round_up(_ceil_div(cols, length), 4)

    def storage_scale_repeat(self, direction: Direction) -> tuple[int, int]:
        """Return how many storage rows and columns one block scale of ``direction`` fills.

        Counted along the axes of the data buffer as stored. For ``mxfp8_2d`` columnwise these are
        the axes of the *rowwise* scales, because its data is not transposed.
        """
        length = max(self.rowwise_block)
        if not self.is_2d or self.scale_encoding == "power_of_two":
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
"""E4M3 with an E8M0 scale for 32 elements of a row, and once more for 32 of a column."""
MXFP8_2D = BlockScaledFormat(
    name="mxfp8_2d",
    element="e4m3",
    data_max=448.0,
    rowwise_block=(32, 32),
    columnwise_copy="shared",
    scale_encoding="e8m0",
    dimension_multiple=32,
)
"""E4M3 with an E8M0 scale for 32x32 elements: both directions read the same bytes."""
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
"""E2M1, two a byte, with an E4M3 scale for 16x16 elements and an fp32 amax an expert."""
FP8_BLOCK = BlockScaledFormat(
    name="fp8_block",
    element="e4m3",
    data_max=448.0,
    rowwise_block=(128, 128),
    columnwise_copy="transposed",
    scale_encoding="power_of_two",
    dimension_multiple=1,
)
"""E4M3 with an fp32 power of two for 128x128 elements."""

FORMATS: Mapping[str, BlockScaledFormat] = MappingProxyType(
    {format.name: format for format in (MXFP8, MXFP8_2D, NVFP4, FP8_BLOCK)}
)
"""Every block-scaled format by name. ``bf16`` is not one: it has neither blocks nor scales."""


def get_format(name: str) -> BlockScaledFormat:
    """Return the block-scaled format called ``name``.

    Raises:
        ConfigError: no block-scaled format has that name; the message lists those that exist.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"format: expected one of {', '.join(FORMATS)}, got '{name}'. Name a block-scaled "
            f"format; 'bf16' has no blocks and no descriptor."
        )
    return FORMATS[name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeight:
    """The buffers of a stack of quantized experts, at their logical shapes.

    The tensors are held, not copied, and may be views with any strides: the record can describe
    storage that somebody else owns. Data buffers are uint8, also where the bytes mean fp8.
    """

    format: BlockScaledFormat
    """Meaning of the bytes."""
    shape: tuple[int, int, int]
    """Logical (experts, rows, cols)."""
    rowwise_data: "Tensor"
    """[E, R, C / elements_per_byte] uint8."""
    rowwise_scale: "Tensor"
    """Factors of dequantization; ``format.scale_shape`` and ``format.scale_dtype``."""
    columnwise_data: "Tensor"
    """uint8, [E, R, C] or transposed; the very memory of ``rowwise_data`` where it is shared."""
    columnwise_scale: "Tensor"
    """Like ``rowwise_scale``, for the columnwise blocks."""
    global_amax: "Tensor | None" = None
    """[E] fp32 for formats with a global amax, else None."""

    def __post_init__(self) -> None:
        """Check every buffer against the format.

        Raises:
            LayoutError: a buffer has the wrong shape, dtype or device, is missing or superfluous,
                or does not share the memory it should.
        """
        import torch

        self.format.check_shape(self.shape, name="QuantizedWeight.shape")
        for direction in DIRECTIONS:
            data_shape = self.format.data_shape(self.shape, direction)
            self._check_buffer(f"{direction}_data", data_shape, torch.uint8)
            scale_shape = self.format.scale_shape(self.shape, direction)
            self._check_buffer(f"{direction}_scale", scale_shape, self.format.scale_dtype)
        if self.format.has_global_amax:
            self._check_buffer("global_amax", self.shape[:1], torch.float32)
        elif self.global_amax is not None:
            raise LayoutError(
                f"QuantizedWeight.global_amax: {self.format.name} has none, got a tensor. "
                f"Leave it out."
            )
        if self.format.columnwise_copy == "shared" and not _same_memory(
            self.rowwise_data, self.columnwise_data
        ):
            raise LayoutError(
                f"QuantizedWeight.columnwise_data: {self.format.name} shares one data buffer, got "
                f"a second one. Pass rowwise_data for both directions."
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
        """Allocate the buffers of a weight, contiguous and not written.

        Args:
            format: format of the buffers.
            shape: logical [E, R, C].
            device: device of the buffers; torch's default if not given.
            name: name of the weight in errors.

        Raises:
            LayoutError: ``shape`` does not fit the format.
        """
        import torch

        checked = format.check_shape(shape, name)

        def data(direction: Direction) -> "Tensor":
            size = format.data_shape(checked, direction)
            return torch.empty(size, dtype=torch.uint8, device=device)

        def scale(direction: Direction) -> "Tensor":
            size = format.scale_shape(checked, direction)
            return torch.empty(size, dtype=format.scale_dtype, device=device)

        rowwise_data = data("rowwise")
        shared = format.columnwise_copy == "shared"
        return cls(
            format=format,
            shape=checked,
            rowwise_data=rowwise_data,
            rowwise_scale=scale("rowwise"),
            columnwise_data=rowwise_data if shared else data("columnwise"),
            columnwise_scale=scale("columnwise"),
            global_amax=torch.empty(checked[:1], dtype=torch.float32, device=device)
            if format.has_global_amax
            else None,
        )

    @classmethod
    def of_buffers(
        cls, format: BlockScaledFormat, shape: Sequence[int], buffers: "Iterable[Tensor]"
    ) -> "QuantizedWeight":
        """Return the record of buffers that exist; nothing is copied.

        Args:
            format: format of the buffers.
            shape: logical [E, R, C].
            buffers: tensors in the order of ``format.buffer_names``, with the shapes and dtypes of
                the fields of this record.

        Raises:
            LayoutError: a buffer does not fit the format.
        """
        fields = dict(zip(format.buffer_names, buffers, strict=True))
        fields.setdefault("columnwise_data", fields["rowwise_data"])
        experts, rows, cols = shape
        return cls(format=format, shape=(experts, rows, cols), **fields)

    def data(self, direction: Direction) -> "Tensor":
        """Return the data buffer of ``direction``, not a copy: uint8, of ``format.data_shape``.

        Raises:
            ConfigError: no such direction.
        """
        _check_direction(direction)
        return self.rowwise_data if direction == "rowwise" else self.columnwise_data

    def scale(self, direction: Direction) -> "Tensor":
        """Return the scale buffer of ``direction``, not a copy: of ``format.scale_shape``.

        Its dtype is ``format.scale_dtype``.

        Raises:
            ConfigError: no such direction.
        """
        _check_direction(direction)
        return self.rowwise_scale if direction == "rowwise" else self.columnwise_scale

    def buffers(self) -> "dict[str, Tensor]":
        """Return every distinct buffer by field name, not copies; shared bytes are listed once.

        Shapes and dtypes are those of the fields.
        """
        return {name: getattr(self, name) for name in self.format.buffer_names}

    def gathered_buffers(self) -> "dict[str, Tensor]":
        """Return the buffers that travel, by field name, not copies; others are derived from them.

        Shapes and dtypes are those of the fields.
        """
        kinds = [
            f"{way}_{kind}" for way in self.format.gathered_directions for kind in ("data", "scale")
        ]
        gathered = {*kinds, "global_amax"}
        return {name: buffer for name, buffer in self.buffers().items() if name in gathered}

    def _check_buffer(self, field: str, shape: Sequence[int], dtype: "torch.dtype") -> None:
        buffer = getattr(self, field)
        where = f"QuantizedWeight.{field}"
        if buffer is None:
            raise LayoutError(f"{where}: {self.format.name} needs {list(shape)} {dtype}, got None.")
        if tuple(buffer.shape) != tuple(shape) or buffer.dtype != dtype:
            raise LayoutError(
                f"{where}: {self.format.name} of shape {list(self.shape)} needs {list(shape)} "
                f"{dtype}, got {list(buffer.shape)} {buffer.dtype}."
            )
        if buffer.device != self.rowwise_data.device:
            raise LayoutError(
                f"{where}: expected the device of rowwise_data, {self.rowwise_data.device}, got "
                f"{buffer.device}."
            )


def _same_memory(a: "Tensor", b: "Tensor") -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ConfigError(
            f"direction: expected {' or '.join(DIRECTIONS)}, got '{direction}'. Write rowwise for "
            "the forward GEMM."
        )


def round_up(value: int, multiple: int) -> int:
    """Return the next multiple of ``multiple`` that is not below ``value``."""
    return _ceil_div(value, multiple) * multiple
