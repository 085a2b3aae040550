"""Amax per expert of one linear, recorded by its storages or loaded from a checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.weights.storage import WeightStorage


class RecordsAmax:
    """Mixin for linears whose storages may record amaxes."""

    name: str
    """Name of the linear, for errors."""
    _whole_amax: tuple[tuple[int, ...], Tensor] | None = None  # versions, amax

    def storages(self) -> Sequence[WeightStorage]:
        """Return the storage of each weight; none for bf16 experts."""
        raise NotImplementedError

    def amax(self) -> Tensor | None:
        """Return the amax of this rank's part of each expert at the last requantization, [E] fp32.

        It covers the masters of all data-parallel ranks, rounded to bf16. A copy; None if not
        recorded. Under expert tensor parallelism, other ranks hold the rest of the experts: see
        :attr:`whole_amax`.
        """
        amaxes = [storage.amax for storage in self.storages()]
        recorded = [amax for amax in amaxes if amax is not None]
        return torch.cat(recorded) if recorded else None

    @property
    def whole_amax(self) -> Tensor | None:
        """Amax of whole experts, [E] fp32, or None if it was not set for the current weights."""
        if self._whole_amax is None or self._whole_amax[0] != self._versions():
            return None
        return self._whole_amax[1]

    @whole_amax.setter
    def whole_amax(self, amax: Tensor) -> None:
        self._whole_amax = self._versions(), amax

    def take_amax(self, loaded: Tensor | None) -> None:
        """Keep loaded amaxes until the next requantization. Call after loading the weights.

        Args:
            loaded: one value per expert, of any floating-point dtype and any shape. None and NaN
                (unknown when saved) are ignored, and so is everything if nothing is recorded.

        Raises:
            LayoutError: another number of experts.
        """
        own = None if loaded is None else self.amax()
        if loaded is None or own is None or loaded.isnan().any():
            return
        if loaded.numel() != own.numel():
            raise LayoutError(
                f"{self.name}.weight_amax: expected one value for each of {own.numel()} experts, "
                f"got {list(loaded.shape)}. Load a checkpoint of as many experts."
            )
        self.whole_amax = loaded.detach().to(own).view(-1).clone()

    def _versions(self) -> tuple[int, ...]:
        return tuple(storage.version for storage in self.storages())
