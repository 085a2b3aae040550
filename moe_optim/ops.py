"""The operations on member tables, and the one place that calls who performs them."""

from typing import Literal

import torch

from moe_optim import reference
from moe_optim.kernels.member_table import MemberTable

Backend = Literal["auto", "reference"]


@torch.no_grad()
def requantize(table: MemberTable, backend: Backend = "auto") -> None:
    """Rewrite every storage of ``table`` from its source, in place, then zero what was consumed.

    The bytes are those of ``reference.quantize``: sources are rounded to bf16 first. Where kernels
    handle the whole table, nothing is planned, allocated or waited for, whatever its size, and a
    CUDA graph can capture the call once it has run outside of one.

    Args:
        table: what to read and write. It knows since it was built which entries kernels handle.
        backend: ``auto`` takes these kernels and the reference for the rest, ``reference`` does
            without kernels. So does a table whose sources have moved, until it is built anew.
    """
    launches, entries = table.launches, table.remainder
    if backend == "reference" or table.has_moved:
        launches, entries = (), table.entries
    for entry in entries:  # before the launches, which may zero the sources
        reference.quantize_into(
            entry.source, entry.target.format, entry.target, name=entry.parameter
        )
    if launches:
        from moe_optim.kernels.requantize_mxfp8 import requantize_mxfp8

        for launch in launches:
            requantize_mxfp8(launch)
    if table.consumed is not None and not (launches and table.zeroes_in_launch):
        table.consumed.zero_()
