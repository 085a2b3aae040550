"""The amax of every expert of a bucket, recorded when its weights are gathered."""

from collections.abc import Sequence
from typing import Any

import torch

from moe_optim.buckets.gather import OwnedMaster
from moe_optim.kernels.amax import AmaxTable
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.weights.storage import WeightStorage


class AmaxRecord:
    """The amaxes of all experts of a bucket, which travel with its gather as one vector.

    Formats with a global amax have theirs without it; see :meth:`of`.

    Args:
        params: weights that record, in the same order on every rank.

    Attributes:
        values: [experts] fp32; a MAX over all ranks completes it between :meth:`fill` and
            :meth:`finish`.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = tuple(params)
        sizes = [storage.shape[0] for storage in self._storages()]
        device = self._storages()[0].device
        self.values = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._parts = self.values.split(sizes)
        amaxes = (storage.recorded_amax for storage in self._storages())
        self._recorded = [amax for amax in amaxes if amax is not None]
        self._search: AmaxTable | None = None

    @classmethod
    def of(cls, params: Sequence[torch.nn.Parameter]) -> "AmaxRecord | None":
        """Return a record of those weights that want one, or None if none does.

        Args:
            params: quantized weights, in the same order on every rank.
        """
        recording = [param for param in params if _storage(param).recorded_amax is not None]
        return cls(recording) if recording else None

    def fill(self, masters: Sequence[OwnedMaster]) -> None:
        """Find this rank's share.

        Args:
            masters: those of this rank; they are the same tensors until :meth:`forget`.
        """
        if self._search is None:
            self._search = AmaxTable.build(
                self._entries(masters), self.values, backend=self._storages()[0].backend
            )
        self._search.launch()

    def finish(self) -> None:
        """Hand the completed maxima to the weights, whose bytes are now those of the masters."""
        torch._foreach_copy_(self._recorded, self._parts)

    def forget(self) -> None:
        """Drop what was planned for masters that may lie elsewhere from now on."""
        self._search = None

    def _entries(self, masters: Sequence[OwnedMaster]) -> list[TableEntry]:
        owned = {id(one.param): one for one in masters}
        entries = []
        for param, storage in zip(self._params, self._storages(), strict=True):
            one = owned.get(id(param))
            entries.append(
                TableEntry(
                    parameter=storage.name,
                    source=self.values.new_empty(0) if one is None else one.master,
                    target=storage.quantized,
                    start=0 if one is None else one.start,
                )
            )
        return entries

    def _storages(self) -> list[WeightStorage]:
        return [_storage(param) for param in self._params]


def _storage(param: Any) -> WeightStorage:
    storage: WeightStorage = param.quantized_storage
    return storage
