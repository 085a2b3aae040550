"""Plans that finish a gather: transpose data, and expand block scales into padded storage."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from moe_optim.formats import BlockScaledFormat, QuantizedWeight
from moe_optim.kernels.cutting import grid, int64
from moe_optim.kernels.plan import BoundKernel, Call, Plan
from moe_optim.kernels.table_entry import TableEntry, derive
from moe_optim.kernels.tuning import SCALE_TILES, TRANSPOSE
from moe_optim.places import Places

_ONE_LINE = 1 | 1 << 16

Copy = tuple[int, int, int, int, int, int, int, int]
"""One buffer of one expert. Data: addresses of source and target; rows and columns in elements; row
strides of both in bytes; 0, 0. Scales: addresses; blocks down and across; source strides down
and across in elements; target row stride in elements; lines per block down, and across from bit
16."""


def plan_finish(entries: Sequence[TableEntry], device: torch.device, *, runs_kernels: bool) -> Plan:
    """Plan the buffers derived after a gather of parameters of any formats on ``device``."""
    by_format: dict[BlockScaledFormat, list[TableEntry]] = {}
    calls: list[Call] = []
    for entry in entries:
        if runs_kernels and can_finish(entry):
            by_format.setdefault(entry.target.format, []).append(entry)
        else:
            calls.append(partial(derive, entry))
    for format, group in by_format.items():
        transposes = [copy for entry in group for copy in _transposes(entry.target)]
        scales = [copy for entry in group for copy in _scale_copies(entry)]
        if transposes or scales:
            pack = 4 * format.elements_per_byte
            calls.append(_bind(transposes, scales, device, pack, scale_dtype=format.scale_dtype))
    return Plan(device=device, calls=tuple(calls))


def plan_transposes(pairs: Sequence[tuple[Tensor, Tensor]]) -> Plan:
    """Plan transposed copies of byte matrices, [R, C] into [C, R], with any row strides."""
    copies: list[Copy] = [
        (
            *(source.data_ptr(), copy.data_ptr(), source.shape[0], source.shape[1]),
            *(source.stride(0), copy.stride(0), 0, 0),
        )
        for source, copy in pairs
    ]
    device = pairs[0][0].device
    kernel = _bind(copies, [], device, 4, scale_dtype=torch.uint8)
    return Plan(
        device=device, calls=(kernel,), places=Places(one for pair in pairs for one in pair)
    )


def _bind(
    transposes: Sequence[Copy],
    scales: Sequence[Copy],
    device: torch.device,
    pack: int,
    *,
    scale_dtype: torch.dtype,
) -> BoundKernel:
    """Return the launch of all copies; ``pack`` is the number of elements per 32-bit word."""
    from moe_optim.kernels.finish_gather import finish_gather_kernel

    words = [number for copy in transposes for number in copy[:2] + copy[4:6]]
    sizes = [size for copy in transposes for size in copy[2:4]]
    if any(word % 4 for word in words) or any(size % pack for size in sizes):
        pack = 1  # rows are not word-aligned: the kernel moves bytes
    tile = TRANSPOSE[pack]
    repeats = any(lines != _ONE_LINE for *_, lines in scales)
    block_rows, block_cols = SCALE_TILES[repeats]
    data_tiles = _tiles(0, transposes, tile.packs * pack, tile.words * pack)
    scale_tiles = _tiles(len(transposes), scales, block_rows, block_cols)
    tiles = torch.cat([data_tiles, scale_tiles])
    return BoundKernel(
        finish_gather_kernel,
        len(tiles),
        int64([*transposes, *scales]).to(device),
        tiles.to(device, torch.int32),
        len(data_tiles),
        PACK=pack,
        WORDS=tile.words,
        PACKS=tile.packs,
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        REPEATS=repeats,
        FP32_SCALES=scale_dtype == torch.float32,
        ALIGNED=all(word % 16 == 0 for word in words),
        ALIGNED_SCALES=all(
            address % (4 * scale_dtype.itemsize) == 0 and stride % 4 == 0
            for _, address, _, _, _, _, stride, _ in scales
        ),
        num_warps=tile.num_warps,
    )


def can_finish(entry: TableEntry) -> bool:
    """Return whether the parameter has experts whose buffers a kernel can address."""
    target = entry.target
    experts, rows, cols = target.shape
    data = (target.rowwise_data, target.columnwise_data)
    inner = [*(buffer.stride(2) for buffer in data), target.columnwise_scale.stride(2)]
    inner += [scale.stride(2) for scale in entry.storage_scales.values()]
    is_moved = target.format.columnwise_copy == "transposed"
    whole_words = not is_moved or target.format.elements_per_byte == 1 or _has_words(target)
    # Offsets within a tile, and the lines of an expert's scales, are 32-bit.
    fits = max(buffer.stride(1) for buffer in data) * 512 < 1 << 31 and rows * cols < 1 << 34
    contiguous = all(step == 1 for step in inner) or _is_transposed_scale(target)
    return experts * rows * cols > 0 and fits and contiguous and whole_words


def _tiles(first: int, copies: Sequence[Copy], height: int, width: int) -> Tensor:
    """Return copy, first row and first column of every tile, [n, 3]; scales count in blocks."""
    tiles = [
        grid(range(first + i, first + i + 1), range(0, copy[2], height), range(0, copy[3], width))
        for i, copy in enumerate(copies)
    ]
    return torch.cat([grid(range(0), range(0), range(0)), *tiles])


def _has_words(target: QuantizedWeight) -> bool:
    data = (target.rowwise_data, target.columnwise_data)
    return all(
        number % 4 == 0
        for buffer in data
        for number in (buffer.data_ptr(), buffer.stride(0), buffer.stride(1))
    )


def _is_transposed_scale(target: QuantizedWeight) -> bool:
    """Return whether the columnwise scales are a transposed view of the rowwise ones."""
    row, column = target.rowwise_scale, target.columnwise_scale
    transposed = row.transpose(1, 2)
    return row.data_ptr() == column.data_ptr() and transposed.stride() == column.stride()


def _transposes(target: QuantizedWeight) -> Iterator[Copy]:
    if target.format.columnwise_copy != "transposed":
        return
    source, copy = target.rowwise_data, target.columnwise_data
    experts, rows, cols = target.shape
    for expert in range(experts):
        yield (
            source.data_ptr() + expert * source.stride(0),
            copy.data_ptr() + expert * copy.stride(0),
            *(rows, cols, source.stride(1), copy.stride(1), 0, 0),
        )


def _scale_copies(entry: TableEntry) -> Iterator[Copy]:
    target = entry.target
    format = target.format
    copies: list[tuple[Tensor, Tensor, tuple[int, int]]] = []
    if format.is_2d and not _is_transposed_scale(target):
        copies.append((target.rowwise_scale.transpose(1, 2), target.columnwise_scale, (1, 1)))
    for direction, stored in entry.storage_scales.items():
        # gathered scales, along the axes of the data as stored
        source = target.rowwise_scale if format.is_2d else target.scale(direction)
        source = source.transpose(1, 2) if format.transposes(direction) else source
        copies.append((source, stored, format.storage_scale_repeat(direction)))
    for source, copy, (down, across) in copies:
        width = source.element_size()
        for expert in range(target.shape[0]):
            yield (
                source.data_ptr() + expert * source.stride(0) * width,
                copy.data_ptr() + expert * copy.stride(0) * width,
                *(source.shape[1], source.shape[2]),
                *(source.stride(1), source.stride(2), copy.stride(1), down | across << 16),
            )
