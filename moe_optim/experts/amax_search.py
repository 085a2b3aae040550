"""Finds the amax of every expert of some parameters: by a kernel where one runs, or in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optim.formats.reference.expert_amax import expert_amax_into
from moe_optim.kernels.amax_table import AmaxTable
from moe_optim.kernels.member_table import Backend, runs_triton
from moe_optim.kernels.table_entry import TableEntry


class AmaxSearch:
    """The amaxes of what a rank owns of the experts of some parameters, for any format.

    Args:
        entries: parameters, of which anything may be owned; sources of one dtype on one device,
            which must stay where they are.
        backend: ``auto`` takes a kernel where one runs, ``reference`` does without.
    """

    def __init__(self, entries: Sequence[TableEntry], backend: Backend = "auto") -> None:
        self._entries = tuple(entries)
        has_kernel = backend == "auto" and runs_triton(entries[0].source.device)
        self._table = AmaxTable.build(entries) if has_kernel else None

    def find_into(self, out: Tensor) -> None:
        """Read every source once, and write the amax of every expert.

        Args:
            out: [experts of all parameters] fp32; zero where nothing is owned of an expert.
        """
        if self._table is not None:
            with torch.cuda.device(out.device):
                self._table.find_into(out)
            return
        out.zero_()
        sizes = [entry.target.shape[0] for entry in self._entries]
        for entry, part in zip(self._entries, out.split(sizes), strict=True):
            _, rows, cols = entry.target.shape
            expert_amax_into(part, entry.source, entry.start, rows * cols)
