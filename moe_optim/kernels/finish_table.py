"""Device descriptors of what follows a gather: data to transpose, and scales to expand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_optim.formats import DIRECTIONS, BlockScaledFormat, QuantizedWeight
from moe_optim.kernels.bound_kernel import BoundKernel
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.kernels.tuning import SCALE_TILES, TRANSPOSE, TransposeTile

_ONE_LINE = 1 | 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinishTable:
    """What one launch derives for many weights of one format; see :meth:`build`."""

    copies: Tensor
    """[num_copies, 8] int64, one a buffer of one expert. Data: addresses of source and target; rows
    and columns in elements; row strides of both in bytes; 0, 0. Scales: addresses; blocks down and
    across; elements to the next source scale down and across; row stride of the target in elements;
    lines a block down, and across in bits 16 and up."""
    tiles: Tensor
    """[num_programs, 3] int32: copy, first row, first column; of scales, counted in blocks."""
    num_transposes: int
    """How many of the tiles are data; those of scales follow."""
    pack: int
    """Elements of a 32-bit word, or 1 where rows do not start at words and bytes are moved."""
    tile: TransposeTile
    fp32_scales: bool
    repeats: bool
    """Whether some block scale is written to several lines."""
    aligned: bool
    """Whether every row of data starts at a multiple of 16 bytes."""
    aligned_scales: bool
    """Whether every row of scales that are written starts at a multiple of 4 elements."""
    alive: tuple[Tensor, ...]
    """Every tensor behind an address."""
    kernels: dict[str, tuple[BoundKernel, ...]] = field(default_factory=dict)
    """Filled by the first launch."""

    @classmethod
    def build(cls, entries: Sequence[TableEntry]) -> "FinishTable | None":
        """Describe what a launch has to derive for weights of one format, None for nothing.

        Args:
            entries: :func:`can_finish` holds for all of them.
        """
        format = entries[0].target.format
        transposes = [row for entry in entries for row in _transposes(entry.target)]
        scales = [row for entry in entries for row in _scale_copies(entry)]
        if not transposes and not scales:
            return None
        buffers = [buffer for entry in entries for buffer in entry.target.buffers().values()]
        stored = [scale for entry in entries for scale in entry.storage_scales.values()]
        return cls._describe(
            transposes,
            scales,
            elements_per_byte=format.elements_per_byte,
            scale_dtype=format.scale_dtype,
            alive=(*buffers, *stored),
        )

    @classmethod
    def of_transposes(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> "FinishTable":
        """Describe copies of bytes [R, C] into [C, R], at least one; rows may lie anywhere."""
        rows = [
            [
                *(source.data_ptr(), copy.data_ptr(), *source.shape),
                *(source.stride(0), copy.stride(0), 0, 0),
            ]
            for source, copy in pairs
        ]
        alive = tuple(one for pair in pairs for one in pair)
        return cls._describe(rows, [], elements_per_byte=1, scale_dtype=torch.uint8, alive=alive)

    @classmethod
    def _describe(
        cls,
        transposes: Sequence[list[int]],
        scales: Sequence[list[int]],
        *,
        elements_per_byte: int,
        scale_dtype: torch.dtype,
        alive: tuple[Tensor, ...],
    ) -> "FinishTable":
        """Cut into tiles what ``copies`` are to have, transposes before scales.

        Args:
            transposes: rows of ``copies`` for data.
            scales: rows of ``copies`` for scales.
            elements_per_byte: of data.
            scale_dtype: of scales.
            alive: every tensor behind an address, at least one.
        """
        pack = 4 * elements_per_byte
        words = [row for copy in transposes for row in copy[:2] + copy[4:6]]
        sizes = [row for copy in transposes for row in copy[2:4]]
        if any(word % 4 for word in words) or any(size % pack for size in sizes):
            pack = 1
        tile = TRANSPOSE[pack]
        data_tiles = [
            _tiles(index, range(0, rows, tile.packs * pack), range(0, cols, tile.words * pack))
            for index, (_, _, rows, cols, *_) in enumerate(transposes)
        ]
        repeats = any(lines != _ONE_LINE for *_, lines in scales)
        down, across = SCALE_TILES[repeats]
        scale_tiles = [
            _tiles(index, range(0, rows, down), range(0, cols, across))
            for index, (_, _, rows, cols, *_) in enumerate(scales, start=len(transposes))
        ]
        device = alive[0].device
        return cls(
            copies=torch.tensor([*transposes, *scales], dtype=torch.int64, device=device),
            tiles=torch.cat([*data_tiles, *scale_tiles]).to(device, torch.int32),
            num_transposes=sum(part.shape[0] for part in data_tiles),
            pack=pack,
            tile=tile,
            repeats=repeats,
            fp32_scales=scale_dtype == torch.float32,
            aligned=all(word % 16 == 0 for word in words),
            aligned_scales=all(
                address % (4 * scale_dtype.itemsize) == 0 and stride % 4 == 0
                for _, address, _, _, _, _, stride, _ in scales
            ),
            alive=alive,
        )


def can_finish(entry: TableEntry) -> bool:
    """Return whether a kernel can address the buffers of these experts, if there are some."""
    target = entry.target
    experts, rows, cols = target.shape
    data = (target.rowwise_data, target.columnwise_data)
    inner = [*(buffer.stride(2) for buffer in data), target.columnwise_scale.stride(2)]
    inner += [scale.stride(2) for scale in entry.storage_scales.values()]
    is_moved = target.format.columnwise_copy == "transposed"
    whole_words = not is_moved or target.format.elements_per_byte == 1 or _has_words(target)
    # A tile's offsets, and the lines of an expert's scales, are counted in 32 bits.
    fits = max(buffer.stride(1) for buffer in data) * 512 < 1 << 31 and rows * cols < 1 << 34
    contiguous = all(step == 1 for step in inner) or _is_transposed_scale(target)
    return experts * rows * cols > 0 and fits and contiguous and whole_words


def _tiles(copy: int, rows: range, cols: range) -> Tensor:
    axes = (range(copy, copy + 1), rows, cols)
    numbers = [torch.arange(a.start, a.stop, a.step, device="cpu") for a in axes]
    return torch.cartesian_prod(*numbers).view(-1, 3)


def _has_words(target: QuantizedWeight) -> bool:
    data = (target.rowwise_data, target.columnwise_data)
    return all(
        number % 4 == 0
        for buffer in data
        for number in (buffer.data_ptr(), buffer.stride(0), buffer.stride(1))
    )


def _is_transposed_scale(target: QuantizedWeight) -> bool:
    """Return whether the columnwise scales are the rowwise ones, seen the other way round."""
    row, column = target.rowwise_scale, target.columnwise_scale
    transposed = row.transpose(1, 2)
    return row.data_ptr() == column.data_ptr() and transposed.stride() == column.stride()


def _transposes(target: QuantizedWeight) -> Iterator[list[int]]:
    if target.format.columnwise_copy != "transposed":
        return
    source, copy = target.rowwise_data, target.columnwise_data
    experts, rows, cols = target.shape
    for expert in range(experts):
        yield [
            source.data_ptr() + expert * source.stride(0),
            copy.data_ptr() + expert * copy.stride(0),
            *(rows, cols, source.stride(1), copy.stride(1), 0, 0),
        ]


def _scale_copies(entry: TableEntry) -> Iterator[list[int]]:
    target = entry.target
    format = target.format
    copies: list[tuple[Tensor, Tensor, tuple[int, int]]] = []
    if format.is_2d and not _is_transposed_scale(target):
        copies.append((target.rowwise_scale.transpose(1, 2), target.columnwise_scale, (1, 1)))
    for direction in DIRECTIONS:
        if direction in entry.storage_scales:
            source = _source_scale(target, format, direction == "columnwise")
            repeat = format.storage_scale_repeat(direction)
            copies.append((source, entry.storage_scales[direction], repeat))
    for source, copy, (down, across) in copies:
        width = source.element_size()
        for expert in range(target.shape[0]):
            yield [
                source.data_ptr() + expert * source.stride(0) * width,
                copy.data_ptr() + expert * copy.stride(0) * width,
                *(source.shape[1], source.shape[2]),
                *(source.stride(1), source.stride(2), copy.stride(1), down | across << 16),
            ]


def _source_scale(target: QuantizedWeight, format: BlockScaledFormat, columnwise: bool) -> Tensor:
    """Return the scales that travelled, along the axes of the data as it is stored."""
    if not columnwise or not format.is_2d:
        return target.columnwise_scale if columnwise else target.rowwise_scale
    transposed = format.transposes("columnwise")
    return target.rowwise_scale.transpose(1, 2) if transposed else target.rowwise_scale
