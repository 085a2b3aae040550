"""Requantization of parameters, whole or sharded, and plans that finish a gather of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats import BlockScaledFormat, QuantizedWeight
from moe_optim.kernels.cutting import grid, int64
from moe_optim.kernels.exchange import Exchange, plan_exchange
from moe_optim.kernels.launch_table import (
    LaunchTable,
    Planned,
    Range,
    can_launch,
    find_gaps,
    own_slots,
)
from moe_optim.kernels.plan import Backend, BoundKernel, Call, Plan, takes_kernels
from moe_optim.kernels.table_entry import TableEntry, derive, encode, find_maxima
from moe_optim.kernels.tuning import SCALE_TILES, TRANSPOSE
from moe_optim.places import Places

__all__ = ["Backend", "MemberTable", "TableEntry"]

_ONE_LINE = 1 | 1 << 16

Copy = tuple[int, int, int, int, int, int, int, int]
"""One buffer of one expert. Data: addresses of source and target; rows and columns in elements; row
strides of both in bytes; 0, 0. Scales: addresses; blocks down and across; source strides down
and across in elements; target row stride in elements; lines per block down, and across from bit
16."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemberTable(Plan):
    """Requantization of some parameters. Build it once with :meth:`build`.

    A launch writes the gathered buffers and zeroes ``consumed``; :attr:`finish` derives the
    remaining buffers after the gather. If shards cut blocks or experts, a launch raises
    LayoutError: instead, every rank launches :attr:`find_maxima`, all-reduces :attr:`exchange` with
    MAX, and launches :attr:`encode`.

    Kernels store the addresses of sources and buffers. Buffers must not move; sources may, and
    :attr:`has_moved` reports it.
    """

    entries: tuple[TableEntry, ...]
    """Parameters, in the order given to :meth:`build`."""
    consumed: Tensor | None
    """Memory to zero after reading: the sources and the gaps between them."""
    exchanges: tuple[Exchange, ...]
    """Maxima that each entry shares with other ranks."""
    exchange: Tensor
    """Maxima of blocks and experts on several ranks, [slots] fp32, in the same order on every rank;
    empty if no shard cuts any."""
    launches: tuple[LaunchTable, ...]
    """Tables of the entries that kernels handle, one per format and source dtype."""
    remainder: tuple[Planned, ...]
    """Entries that plain torch handles; all of them without a supported GPU."""
    find_maxima: Plan
    """Plan that writes this rank's share of :attr:`exchange`; NaN counts as zero."""
    encode: Plan
    """Plan that writes the owned data of every entry, and the scales of all partly owned blocks."""
    encode_unshared: Plan
    """Plan for after a step, whose kernels have encoded whole blocks: encodes the remaining entries
    that need no other rank, and writes this rank's share of :attr:`exchange`."""
    encode_shared: Plan
    """Plan that encodes the rest after a step, once :attr:`exchange` is reduced over all ranks."""
    finish: Plan
    """Plan that derives the buffers not gathered: columnwise copies of 2-D formats, and scales in
    storage."""

    @classmethod
    def build(
        cls,
        entries: Sequence[TableEntry],
        *,
        consumed: Tensor | None = None,
        backend: Backend = "auto",
    ) -> "MemberTable":
        """Check the entries, and assign them to kernels or plain torch.

        Args:
            entries: parameters of any shapes and formats; may be empty. If shards cut parameters,
                every rank passes the same ones in the same order with the same cuts, including
                those it owns nothing of.
            consumed: tensor of any shape and dtype over the memory that a launch zeroes, or None to
                leave sources unchanged.
            backend: ``auto`` for kernels where supported, ``reference`` for plain torch.

        Raises:
            ConfigError: unknown backend.
            LayoutError: a source has the wrong shape, dtype, strides or device for its target, or a
                range that does not run from one cut to another.
        """
        device = entries[0].source.device if entries else torch.device("cpu")
        runs_kernels = takes_kernels(backend, device)
        planned = _plan_exchanges(entries)
        slots = sum(shared.size for _, shared in planned)
        groups: dict[tuple[BlockScaledFormat, torch.dtype], list[Planned]] = {}
        remainder = []
        for entry, shared in planned:
            if runs_kernels and can_launch(entry):
                key = (entry.target.format, entry.source.dtype)
                groups.setdefault(key, []).append((entry, shared))
            else:
                remainder.append((entry, shared))
        owned = [own_slots(group) for group in groups.values()]
        amax = torch.zeros(slots + sum(owned), dtype=torch.float32, device=device)
        gaps = _gaps_to_zero(consumed, list(groups.values()))
        launches = [
            LaunchTable(
                group,
                amax,
                first_free_slot=slots + sum(owned[:index]),
                gaps=gaps,
            )
            for index, group in enumerate(groups.values())
        ]
        exchange = amax[:slots]
        maxima, encode, unshared, left = _plan_calls(launches, remainder, exchange, consumed)
        refuse = partial(_refuse_shared, slots)
        sources = Places.of_each_memory(entry.source for entry, _ in chain(*groups.values()))
        plan = partial(Plan, device=device, places=sources)
        return cls(
            device=device,
            calls=(refuse,) if slots else (*maxima, *encode),
            places=sources,
            entries=tuple(entries),
            consumed=consumed,
            exchanges=tuple(shared for _, shared in planned),
            exchange=exchange,
            launches=tuple(launches),
            remainder=tuple(remainder),
            find_maxima=plan(calls=maxima),
            encode=plan(calls=encode),
            encode_unshared=plan(calls=unshared),
            encode_shared=plan(calls=left),
            finish=plan_finish(entries, device, runs_kernels=runs_kernels),
        )

    @property
    def zeroes_in_launch(self) -> bool:
        """Whether kernels zero ``consumed``, including sources of the remainder."""
        return any(launch.zeroes for launch in self.launches)

    @property
    def num_members(self) -> int:
        """Number of experts in the table, over all parameters."""
        return sum(entry.target.shape[0] for entry in self.entries)


def _plan_exchanges(entries: Sequence[TableEntry]) -> list[Planned]:
    planned: list[Planned] = []
    slots = 0
    for entry in entries:
        entry.check()
        shared = plan_exchange(
            entry.target.format,
            entry.target.shape,
            entry.cuts,
            first=slots,
            shares_experts=entry.shares_experts,
            name=entry.parameter,
        )
        planned.append((entry, shared))
        slots += shared.size
    return planned


def _gaps_to_zero(
    consumed: Tensor | None, groups: Sequence[Sequence[Planned]]
) -> list[Range] | None:
    """Return what a launch zeroes besides its sources, or None if it cannot zero ``consumed``."""
    if consumed is None or len(groups) != 1 or any(shared.block_rows for _, shared in groups[0]):
        return None
    sources = [entry.source for entry, _ in groups[0]]
    return find_gaps(consumed, sources) if consumed.device == sources[0].device else None


def _plan_calls(
    launches: Sequence[LaunchTable],
    remainder: Sequence[Planned],
    exchange: Tensor,
    consumed: Tensor | None,
) -> tuple[tuple[Call, ...], ...]:
    """Return the calls of ``find_maxima``, ``encode``, ``encode_unshared`` and ``encode_shared``.

    Plain torch precedes kernels, which may zero the sources.
    """
    alone = [planned for planned in remainder if not planned[1].size]
    shared = [planned for planned in remainder if planned[1].size]

    def encoded(entries: Iterable[Planned]) -> list[Call]:
        return [partial(encode, *planned, exchange) for planned in entries]

    zero: list[Call] = [exchange.zero_] if exchange.numel() else []
    find: list[Call] = [partial(find_maxima, *planned, exchange) for planned in shared]
    clear: list[Call] = []
    if consumed is not None and not any(one.zeroes for one in launches):
        clear.append(consumed.zero_)
    experts = [call for one in launches for call in one.expert_maxima]
    cut = [call for one in launches for call in one.cut_maxima]
    whole = [call for one in launches for call in one.encode_whole]
    pieces = [call for one in launches for call in one.encode_cut]
    late = [call for one in launches if one.format.has_global_amax for call in one.encode_whole]
    return (
        (*zero, *find, *experts, *cut),
        (*encoded(remainder), *whole, *pieces, *clear),
        (*cut, *find, *encoded(alone)),
        (*late, *pieces, *encoded(shared)) if exchange.numel() else (),
    )


def _refuse_shared(count: int) -> None:
    raise LayoutError(
        f"requantize: expected shards of whole blocks and experts, got {count} maxima that "
        "several ranks share. Launch table.find_maxima, reduce table.exchange with MAX over the "
        "ranks, then launch table.encode."
    )


# Finish of a gather: transposed data, and block scales expanded into padded storage


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
