"""The operations on member tables, and the one place that chooses who performs them."""

from typing import Literal

import torch

from moe_optim import reference
from moe_optim.kernels.member_table import MemberTable

Backend = Literal["auto", "reference"]


@torch.no_grad()
def requantize(table: MemberTable, backend: Backend = "auto") -> None:
    """Rewrite every storage of ``table`` from its source, in place, then zero what was consumed.

    The bytes are those of ``reference.quantize``: sources are rounded to bf16 first.

    Args:
        table: what to read and write.
        backend: ``auto`` takes the fastest that runs here, today always ``reference``.
    """
    for entry in table.entries:
        reference.quantize_into(
            entry.source, entry.target.format, entry.target, name=entry.parameter
        )
    if table.consumed is not None:
        table.consumed.zero_()
