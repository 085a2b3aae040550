"""The amaxes of the experts of one linear: as its storages recorded them, or as loaded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.weights.storage import WeightStorage


class RecordsAmax:
    """A linear whose storages may record, whoever owns its weights.

    Attributes:
        name: name of the linear, for errors.
    """

    name: str
    _whole_amax: tuple[tuple[int, ...], Tensor] | None = None  # and the versions whose amax it is

    def storages(self) -> Sequence[WeightStorage]:
        """Return the storage behind each weight; none where experts are bf16."""
        raise NotImplementedError

    def amax(self) -> Tensor | None:
        """Return the amax of what each expert has here, at the last requantization, [E] fp32.

        It is that of the masters of all data-parallel ranks, rounded to bf16. A copy; None where
        nothing is recorded. Under expert tensor parallelism, other ranks hold the rest of the
        experts: see :attr:`whole_amax`.
        """
        amaxes = [storage.amax for storage in self.storages()]
        recorded = [amax for amax in amaxes if amax is not None]
        return torch.cat(recorded) if recorded else None

    @property
    def whole_amax(self) -> Tensor | None:
        """The amax of whole experts, [E] fp32, if it was set for the weights as they are."""
        if self._whole_amax is None or self._whole_amax[0] != self._versions():
            return None
        return self._whole_amax[1]

    @whole_amax.setter
    def whole_amax(self, amax: Tensor) -> None:
        self._whole_amax = self._versions(), amax

    def take_amax(self, loaded: Tensor | None) -> None:
        """Keep what was loaded until the next requantization, once the weights are loaded.

        Args:
            loaded: one value an expert, of any floating-point dtype and any shape. NaN, where
                whoever saved did not know it, and None are passed over, and so is everything where
                nothing is recorded.

        Raises:
            LayoutError: it is of another number of experts.
        """
        own = self.amax()
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
