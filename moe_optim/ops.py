"""The operations on member tables, and the one place that calls who performs them.

A requantization writes what travels; ``finish_gather`` derives the rest, on every rank, from what
has arrived::

    requantize -> all-gather -> finish_gather                        shards of whole blocks
    partial_amax -> MAX all-reduce -> encode -> all-gather -> ...    shards that cut blocks
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moe_optim import reference
from moe_optim.errors import LayoutError
from moe_optim.kernels.exchange import AMAX_SLOTS
from moe_optim.kernels.launch_table import LaunchTable, Planned
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.reference import ranges

Backend = Literal["auto", "reference"]


def requantize(table: MemberTable, backend: Backend = "auto") -> None:
    """Rewrite the planes of ``table`` that travel, in place, then zero what was consumed.

    The bytes are those of ``reference.quantize``: sources are rounded to bf16 first. Where kernels
    handle the whole table, nothing is planned, allocated or waited for, whatever its size, and a
    CUDA graph can capture the call once it has run outside of one.

    Args:
        table: what to read and write. It knows since it was built which entries kernels handle.
        backend: ``auto`` takes these kernels and the reference for the rest, ``reference`` does
            without kernels. So does a table whose sources have moved, until it is built anew.

    Raises:
        LayoutError: some block or expert lies on several ranks; nothing has been written.
    """
    shared = table.exchange.numel()
    if shared:
        raise LayoutError(
            f"requantize: expected shards of whole blocks and experts, got {shared} maxima that "
            "several ranks share. Call partial_amax, reduce table.exchange with MAX "
            "over the ranks, then call encode."
        )
    partial_amax(table, backend)
    encode(table, backend)


def partial_amax(table: MemberTable, backend: Backend = "auto") -> None:
    """Find this rank's share of the maxima that ``encode`` needs before it can write anything.

    Every rank calls it, then one MAX all-reduce of ``table.exchange``, then ``encode``. NaN counts
    as zero, and maxima of fp32 are exact in any order.
    """
    launches, entries = _split(table, backend)
    if table.exchange.numel():
        table.exchange.zero_()
        _find_amaxes(entries, table.exchange)
    if launches:
        from moe_optim.kernels.launch import launch_amax

        for launch in launches:
            launch_amax(launch)


def encode(table: MemberTable, backend: Backend = "auto") -> None:
    """Write the owned data of every entry, and the scales of each block that is owned in part.

    Args:
        table: ``partial_amax`` has been called, and its ``exchange`` holds the maxima over all
            ranks.
        backend: as for :func:`requantize`, and the same as for ``partial_amax``.
    """
    launches, entries = _split(table, backend)
    if entries:  # before the launches, which may zero the sources
        _encode(entries, table.exchange)
    if launches:
        from moe_optim.kernels.launch import launch_encode

        for launch in launches:
            launch_encode(launch)
    if table.consumed is not None and not (launches and table.zeroes_in_launch):
        table.consumed.zero_()


def finish_gather(table: MemberTable, backend: Backend = "auto") -> None:
    """Derive what did not travel: columnwise copies of 2-D formats, and scales in storage.

    The whole of every parameter is read from the planes that travel, whoever wrote them. Nothing
    happens where nothing is to be derived.
    """
    entries = table.entries if backend == "reference" else table.unfinished
    if entries:
        _derive(entries)
    if table.finishes and backend != "reference":
        from moe_optim.kernels.launch import launch_finish

        for finish in table.finishes:
            launch_finish(finish)


@torch.no_grad()
def _find_amaxes(entries: Sequence[Planned], exchange: Tensor) -> None:
    for entry, shared in entries:
        if shared.size and entry.source.numel():
            ranges.partial_amax_into(
                entry.source,
                entry.start,
                entry.target,
                exchange,
                bands=shared.bands,
                experts=shared.experts,
            )


@torch.no_grad()
def _encode(entries: Sequence[Planned], exchange: Tensor) -> None:
    for entry, shared in entries:
        if entry.is_whole:
            values = entry.source.view(entry.target.shape)
            reference.quantize_wire_into(
                values, entry.target.format, entry.target, name=entry.parameter
            )
        elif entry.source.numel():
            ranges.encode_into(
                entry.source,
                entry.start,
                entry.target,
                exchange,
                bands=shared.bands,
                experts={e: (slot, slot + AMAX_SLOTS) for e, slot in shared.experts.items()},
            )


@torch.no_grad()
def _derive(entries: Sequence[TableEntry]) -> None:
    for entry in entries:
        reference.derive_into(entry.target)
        for direction, scale in entry.storage_scales.items():
            reference.expand_scale_into(entry.target, direction, scale)


def _split(
    table: MemberTable, backend: Backend
) -> tuple[tuple[LaunchTable, ...], tuple[Planned, ...]]:
    """Return the launches to make, and the entries left to the reference."""
    if backend == "reference" or table.has_moved:
        return (), tuple(zip(table.entries, table.exchanges, strict=True))
    return table.launches, table.remainder
